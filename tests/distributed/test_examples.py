"""The examples run, and stay short."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
STEP = re.compile(r"step (\d+): loss ([\d.]+)")


def launch(ranks: int, *arguments: str) -> dict[int, float]:
    """Run an example on so many ranks, as torchrun does; return the losses by step."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(EXAMPLES / arguments[0]), *arguments[1:]]
    processes = [
        subprocess.Popen(
            command,
            env={**os.environ, **place, "RANK": str(rank), "WORLD_SIZE": str(ranks)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    outputs = [process.communicate(timeout=300) for process in processes]
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors[-4000:]
    return {int(step): float(loss) for step, loss in STEP.findall(outputs[0][0])}


@pytest.mark.filterwarnings("ignore")
def test_a_run_of_two_ranks_goes_on_on_three_and_on_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import fsdp2  # type: ignore[import-not-found]
    import resume_elsewhere  # type: ignore[import-not-found]

    model = fsdp2.make_model()
    optimizer = fsdp2.make_optimizer(model)
    straight = {step: fsdp2.train_step(model, optimizer, step) for step in range(6)}
    assert straight[5] < straight[0]

    first = launch(2, "fsdp2.py", "--steps", "4", "--out", str(tmp_path))
    on_three = launch(3, "resume_elsewhere.py", "--from", str(tmp_path), "--steps", "2")
    monkeypatch.setattr(sys, "argv", ["resume_elsewhere.py", "--from", str(tmp_path), "--steps", "2"])
    capsys.readouterr()
    resume_elsewhere.main()
    on_one = {int(step): float(loss) for step, loss in STEP.findall(capsys.readouterr().out)}

    assert on_three.keys() == on_one.keys() == {4, 5}
    for step, loss in (first | on_three).items():
        # Gradients are averaged over ranks in another order, and the first bits of codes may follow.
        assert abs(loss - straight[step]) < 5e-3
    assert all(abs(on_one[step] - on_three[step]) < 5e-3 for step in on_one)


def test_examples_are_short() -> None:
    for path in EXAMPLES.glob("*.py"):
        assert len(path.read_text().splitlines()) < 100, path
