"""Kernels compile ahead of time for GPUs that are not here, without spills and with wide loads."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
variants = pytest.importorskip("stquant.kernels.triton.variants")

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "triton_compile.py"


def test_pairs_of_choices_compile(tmp_path: Path) -> None:
    """The script stops at spills and at narrow access; a process of its own, as this one interprets."""
    environment = {**os.environ, "TRITON_DEFAULT_FP_FUSION": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, SCRIPT, "--few"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    kernels = [line for line in done.stdout.splitlines() if "Cost(" in line]
    assert len(kernels) == len(variants.pairs(variants.FEW)) + 8
    assert all("spills=0" in line for line in kernels), done.stdout
    assert all(any(architecture in line for line in kernels) for architecture in variants.ARCHITECTURES)


@pytest.mark.parametrize("kinds", [variants.FEW, variants.MANY], ids=["few", "many"])
def test_every_pair_occurs(kinds) -> None:
    """What a job is made of shows in its constants: dtype with format, format with block, rule with architecture."""
    jobs = variants.pairs(kinds)
    firsts, _, weights, blocks, architectures = kinds
    found = {(job["FIRST"], job["FIRST_BITS"], job["PARAM"], job["RESIDUAL_BITS"]) for _, _, job in jobs}
    assert {(f[0], f[1], w[0], w[2]) for f, w in itertools.product(firsts, weights)} == found
    found = {(job["FIRST"], job["FIRST_BITS"], job["BLOCK"], job["WHOLE"]) for _, _, job in jobs}
    assert {(f[0], f[1], *b) for f, b in itertools.product(firsts, blocks)} == found
    rules = ("adam", "sgd", "lion")
    assert {(a, name) for a, name, _ in jobs} == set(itertools.product(architectures, rules))
    assert len(jobs) < 3 * max(len(a) * len(b) for a, b in itertools.combinations(kinds, 2))
