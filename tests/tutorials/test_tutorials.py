"""Every tutorial runs as it stands, and prints what it shows; `--overwrite` writes that anew."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tutorials.play import blocks

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "tutorials").glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_tutorial_runs_and_prints_what_it_shows(page: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.tutorials.play", str(page)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{page}: {done.stdout}{done.stderr}"
    printed = json.loads(done.stdout.splitlines()[-1])
    if request.config.getoption("--overwrite"):
        _overwrite(page, printed)
    assert [block.text for block in blocks(page.read_text()) if block.kind == "text"] == printed


def _overwrite(page: Path, printed: list[str]) -> None:
    text = page.read_text()
    shown = [block for block in blocks(text) if block.kind == "text"]
    for block, new in reversed(list(zip(shown, printed, strict=True))):
        text = text[: block.start] + new + text[block.start + len(block.text) :]
    page.write_text(text)
