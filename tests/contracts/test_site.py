"""The documentation site: it builds without a warning, lacks no public name, and fetches nothing."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import stquant

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "stquant"
MODULES = {
    "stquant.memory": "report/memory.py",
    "stquant.checkpoint.convert": "checkpoint/convert.py",
    "stquant.planning.plan": "planning/plan.py",
    "stquant.planning.sources": "planning/sources.py",
    "stquant.report.history": "report/history.py",
    "stquant.report.inspection": "report/inspection.py",
    "stquant.report.runlog": "report/runlog.py",
    **{f"stquant.integrations.{path.stem}": f"integrations/{path.name}" for path in SOURCE.glob("integrations/[!_]*")},
}
"""Modules that users import beside the package itself, and their files."""

METHODS = ("ledger", "decisions", "set_policy", "init_state", "step", "state_dict", "export_state_dict")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def documented(site: Path) -> set[str]:
    pages = [page.read_text() for page in (site / "reference").glob("*.html")]
    return {found for page in pages for found in re.findall(r'<h\d id="(stquant\.[\w.]+)"', page)}


def _public_names(file: str) -> set[str]:
    defined = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    nodes = [node for node in ast.parse((SOURCE / file).read_text()).body if isinstance(node, defined)]
    return {node.name for node in nodes if not node.name.startswith("_")}


def test_every_public_name_is_in_the_reference(documented: set[str]) -> None:
    assert {f"stquant.{name}" for name in stquant.__all__} <= documented
    assert {f"stquant.optim.base.PackedOptimizer.{name}" for name in METHODS} <= documented
    for module, file in MODULES.items():
        names = {f"{module}.{name}" for name in _public_names(file)}
        assert names
        assert names <= documented, module


def test_what_the_documents_import_is_in_the_reference(documented: set[str]) -> None:
    text = "\n".join(path.read_text() for path in (ROOT / "docs").rglob("*.md"))
    for module, names in re.findall(r"^\s*from (stquant[\w.]*) import ([\w, ]+)$", text, re.MULTILINE):
        assert {f"{module}.{name.strip()}" for name in names.split(",")} <= documented


def test_pages_fetch_nothing(site: Path) -> None:
    fetched = re.compile(r'<(?:script|img|iframe)[^>]* src="(?:https?:)?//|<link[^>]* href="(?:https?:)?//')
    pages = list(site.rglob("*.html"))
    assert len(pages) > len(list((ROOT / "docs").glob("*.md")))
    assert not [page for page in pages if fetched.search(page.read_text())]
    styles = [path for path in site.rglob("*.css") if re.search(r"url\(['\"]?https?:|@import", path.read_text())]
    assert not styles
