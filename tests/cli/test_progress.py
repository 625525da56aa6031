"""Progress of the commands that take long: on a terminal only, and never with `--quiet`."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn
from typer.testing import CliRunner

from stquant.cli import calibrate, console, demo
from stquant.cli.main import app
from stquant.jobs.demo import Comparison
from tests.cli.test_golden import RUNS, _findings, _probes

pytestmark = pytest.mark.filterwarnings("default")

COMMANDS = {
    "train": (("train", "--model", "vit", "--steps", "1"), "vit"),
    "demo": (("demo",), "gpt2"),
    "calibrate": (("calibrate", "--models", "vit"), "vit"),
    "convert": (("convert", "adamw.pt", "ours.pt"), "torch to stquant"),
}
"""Calls, and what the description of their bars begins with."""


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint to convert, and recorded answers where a real one takes minutes."""
    monkeypatch.chdir(tmp_path)
    param = nn.Parameter(torch.ones(64, 128))
    param.grad = torch.ones(64, 128)
    optimizer = torch.optim.AdamW([param])
    optimizer.step()
    torch.save(optimizer.state_dict(), "adamw.pt")

    def compared(jobs: Any, progress: Any) -> Comparison:
        progress(jobs[0], 1, 2, 0.5)
        return Comparison(RUNS)

    def probed(settings: Any, progress: Any, kept: Any) -> Any:
        made = _probes()
        progress("vit", 1, 2, made[0])
        return made

    monkeypatch.setattr(demo, "compare", compared)
    monkeypatch.setattr(calibrate, "run", probed)
    monkeypatch.setattr(calibrate, "findings", lambda settings, made: _findings())


def shown(monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], terminal: bool) -> tuple[str, str]:
    """Return what a command draws on the error stream, and what it prints."""
    stream = io.StringIO()
    monkeypatch.setattr(console, "err", Console(file=stream, force_terminal=terminal, width=120))
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return stream.getvalue(), result.output


@pytest.mark.parametrize("name", COMMANDS)
def test_progress_is_drawn_on_a_terminal(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments, begin = COMMANDS[name]
    drawn, printed = shown(monkeypatch, arguments, terminal=True)
    assert begin in drawn
    assert "1/" in drawn
    assert printed


@pytest.mark.parametrize("name", COMMANDS)
def test_quiet_says_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(monkeypatch, (*COMMANDS[name][0], "--quiet"), terminal=True) == ("", "")


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "train"])
def test_nothing_is_drawn_where_there_is_no_terminal(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, printed = shown(monkeypatch, COMMANDS[name][0], terminal=False)
    assert (drawn, bool(printed)) == ("", True)


def test_quiet_json_is_json_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, printed = shown(monkeypatch, (*COMMANDS["convert"][0], "--quiet", "--json"), terminal=True)
    assert drawn == ""
    assert printed.startswith("{")
