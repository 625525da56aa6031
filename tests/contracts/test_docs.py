"""The documents against the code and the records they speak of."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from stquant.cli.main import app

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "benchmarks" / "README.md",
    *(ROOT / "docs").rglob("*.md"),
]


def test_generated_tables_are_up_to_date() -> None:
    command = [sys.executable, "-m", "benchmarks.tables", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}: run make tables"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", document.read_text()):
        assert (document.parent / target).exists(), target


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_commands_in_the_documents_parse(document: Path) -> None:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    for line in re.findall(r"^stquant [^\n#]+", document.read_text(), re.MULTILINE):
        _, name, *arguments = shlex.split(line)
        commands[name].make_context(name, arguments, resilient_parsing=False)
