"""The commands, as a user types them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from stquant.cli.main import app
from stquant.jobs.contenders import DEMO

pytestmark = pytest.mark.filterwarnings("default")
SHORT = ["train", "--model", "vit", "--steps", "4"]


def stquant(*args: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(args))
    assert result.exit_code == code, result.output
    return result.output


def test_train_writes_a_record_and_a_checkpoint_and_resumes(tmp_path: Path) -> None:
    whole = json.loads(stquant(*SHORT, "--policy", "4", "--json", "--out", str(tmp_path), "--save-every", "2"))
    assert whole["steps"] == 4
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["run"] == whole
    assert record["conditions"]["packages"]["torch"]
    again = json.loads(stquant(*SHORT, "--policy", "4", "--json", "--resume", str(tmp_path / "checkpoint.pt")))
    assert again == whole


def test_train_takes_a_published_recipe() -> None:
    result = json.loads(stquant(*SHORT, "--policy", "bnb8", "--json"))
    assert result["optimizer"] == "STQuant bnb8"
    assert 8 < result["true_bits"] < 32


def test_train_prints_a_summary_and_the_ledger() -> None:
    text = stquant(*SHORT, "--ledger")
    assert "true bits per state element" in text
    assert "not packed because" in text


@pytest.mark.parametrize(
    "args",
    [
        [*SHORT, "--policy", "int4"],
        [*SHORT, "--resume", "nowhere.pt"],
        [*SHORT, "--dtype", "bfloat16", "--master-bits", "9"],
        ["train", "--model", "bert"],
        ["train", "--model", "vit", "--steps", "0"],
        ["calibrate", "--models", "gpt2,bert"],
        ["calibrate", "--tensors", "1"],
    ],
    ids=" ".join,
)
def test_misuse_exits_with_two(args: list[str]) -> None:
    stquant(*args, code=2)


def test_demo_compares_and_draws(tmp_path: Path) -> None:
    data = json.loads(stquant("demo", "--steps", "2", "--json", "--out", str(tmp_path)))
    assert len(data["rows"]) == 2 * len(DEMO)
    assert (tmp_path / "demo.png").exists()
    assert json.loads((tmp_path / "demo.json").read_text())["rows"] == data["rows"]


PROBE = ["calibrate", "--models", "clip", "--tensors", "2", "--fork", "0.004", "--length", "1", "--examples", "10"]


def test_calibrate_writes_a_record_and_selects_factors(tmp_path: Path) -> None:
    out = tmp_path / "calibration.json"
    data = json.loads(stquant(*PROBE, "--json", "--out", str(out)))
    written = json.loads(out.read_text())
    assert written.pop("conditions")["packages"]["torch"]
    assert written == data
    assert list(tmp_path.iterdir()) == [out]
    assert list(data) == ["settings", "without_effect", "formats", "questions", "probes"]
    assert len(data["probes"]) == 2 * 6
    for answer in data["questions"].values():
        found = answer["selections"]["clip"]
        assert len(found["names"]) == len(found["exponents"]) == 3
        assert 0.0 <= found["certificate"]["r2"] <= found["certificate"]["best_r2"] + 1e-6 <= 1.0 + 1e-6


def test_calibrate_prints_what_it_selected() -> None:
    text = stquant(*PROBE)
    assert "what tells tensors apart" in text
    assert "by chance" in text
