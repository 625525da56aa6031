"""`stquant report` and `stquant train --log`, as a user types them."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
from typer.testing import CliRunner

from stquant.cli.main import app
from tests.report import runs

pytestmark = pytest.mark.filterwarnings("default")
SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "schemas" / "report.json").read_text())


def stquant(*args: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(args))
    assert result.exit_code == code, result.output
    return result.stdout


def log(tmp_path: Path, budget: int | None = 2000) -> str:
    return str(runs.write(tmp_path / "run.jsonl", runs.decisions(budget), [(1, 5.0), (45, 0.5)]))


def test_json_follows_the_schema(tmp_path: Path) -> None:
    data = json.loads(stquant("report", log(tmp_path), "--json"))
    jsonschema.validate(data, SCHEMA)
    assert [change["step"] for change in data["changes"]] == [10, 40]
    assert [held["bytes"] for held in data["bytes"]] == [904, 1160, 1160, 1032]
    jsonschema.validate(json.loads(stquant("report", log(tmp_path, None), "--json")), SCHEMA)


def test_it_writes_a_page_and_a_picture(tmp_path: Path) -> None:
    page, picture = tmp_path / "new" / "run.html", tmp_path / "new" / "run.png"
    text = stquant("report", log(tmp_path), "--html", str(page), "--png", str(picture))
    assert page.read_text().startswith("<!doctype html>")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert text.splitlines()[-2:] == [f"written: {page}", f"written: {picture}"]


def test_an_exceeded_budget_exits_with_one(tmp_path: Path) -> None:
    data = json.loads(stquant("report", log(tmp_path, 1100), "--json", code=1))
    assert data["exceeded"] == [10, 20]


@pytest.mark.parametrize("text", [None, "", "step, loss\n"], ids=["missing", "empty", "no log"])
def test_misuse_exits_with_two(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "run.jsonl"
    if text is not None:
        path.write_text(text)
    stquant("report", str(path), code=2)


def test_a_training_run_writes_its_log_and_continues_it(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    train = ["train", "--model", "vit", "--steps", "12", "--policy", "adaptive", "--log", str(path), "--json"]
    stquant(*train, "--out", str(tmp_path), "--save-every", "5")
    whole = path.read_text()
    data = json.loads(stquant("report", str(path), "--json"))
    jsonschema.validate(data, SCHEMA)
    assert data["steps"] == len(data["losses"]) == 12
    assert data["policies"][0]["steps"] == [10]
    assert {state["state"] for state in data["states"]} == {"exp_avg", "exp_avg_sq"}
    stquant(*train, "--resume", str(tmp_path / "checkpoint.pt"))
    assert path.read_text() == whole
    stquant(*train, code=2)  # a fresh run does not write over the log of another
    assert path.read_text() == whole
