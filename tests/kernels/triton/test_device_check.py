"""The script for machines with a GPU runs from end to end without one, at toy size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytest.importorskip("transformers")

ROOT = Path(__file__).parents[3]


def test_every_part_runs(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, ROOT / "benchmarks" / "device_check.py", "--toy", "--out", tmp_path / "figures.json"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "figures.json").read_text())
    assert found["device"] == "interpreter"
    assert found["parity"]["transferred_formats"] > 1
    assert found["graph"]["captured"] is False
    assert found["bandwidth"]["copy_bytes_per_second"] > 0
    assert {"stquant default", "torch fused", "torch foreach"} <= found["step"].keys()
    losses = [run["loss"] for run in found["training"].values() if isinstance(run, dict)]
    assert len(losses) == 3
    assert max(losses) - min(losses) < 0.1, "two steps from one start"
