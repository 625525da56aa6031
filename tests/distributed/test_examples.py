"""The examples run as they stand in the documents, and stay short."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(ranks: int, *arguments: str) -> dict[int, float]:
    """Run an example on so many ranks, 0 without a launcher; return losses by step."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
    script, *options = arguments
    command = [sys.executable, *launcher, str(EXAMPLES / script), *options]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-4000:]
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+): loss ([\d.]+)", done.stdout)}


def test_a_run_of_two_ranks_goes_on_on_three_and_on_one(tmp_path: Path) -> None:
    straight = run(2, "fsdp2.py", "--steps", "8", "--out", str(tmp_path / "straight"))
    assert straight[7] < straight[0]
    run(2, "fsdp2.py", "--steps", "5", "--out", str(tmp_path / "stopped"))
    for ranks in (3, 0):
        resumed = run(ranks, "resume_elsewhere.py", "--from", str(tmp_path / "stopped"), "--steps", "3")
        assert resumed.keys() == {5, 6, 7}
        # States and weights are equal to the bit; the loss is not, because sums of gradients are ordered by rank.
        assert all(abs(resumed[step] - straight[step]) < 2e-3 for step in resumed)


def test_examples_are_short() -> None:
    for path in EXAMPLES.glob("*.py"):
        assert len(path.read_text().splitlines()) < 100, path
