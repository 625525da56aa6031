"""Kernels compile ahead of time for GPUs that are not here, without spills and with wide loads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "triton_compile.py"


@pytest.mark.parametrize("architecture", ["sm_90", "gfx942"])
def test_the_default_kernels_compile(architecture: str) -> None:
    """The script stops at spills and at narrow access; a process of its own, as this one interprets."""
    environment = {**os.environ, "TRITON_DEFAULT_FP_FUSION": "0"}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, SCRIPT, "--quick", "--architectures", architecture],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    kernels = [line for line in done.stdout.splitlines() if architecture in line]
    assert len(kernels) == 2
    assert all("spills=0" in line for line in kernels), done.stdout
