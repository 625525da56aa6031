"""What the commands print, word for word; `pytest tests/cli --overwrite` writes it anew."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from typer.main import get_command
from typer.testing import CliRunner

import stquant
from stquant.cli import calibrate, demo, doctor, formats
from stquant.cli.main import app
from stquant.jobs.calibration import findings
from stquant.jobs.demo import Comparison
from stquant.jobs.probes import PROBED, Probe, Settings
from stquant.kernels.backend import Explanation
from stquant.policy.factors import NAMES
from stquant.report.formats import describe
from tests.optim.helpers import gradients, parameters, run
from tests.report import runs as logs

pytestmark = pytest.mark.filterwarnings("default")
ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent / "golden"
SCHEMAS = ROOT / "docs" / "schemas"
PLAN = ("plan", "tests.planning.models:convolutions")

COMMANDS: dict[str, tuple[tuple[str, ...], int]] = {
    "plan": (PLAN, 0),
    "plan_memory": ((*PLAN, "--dtype", "bfloat16", "--memory", "140kB"), 0),
    "plan_too_small": ((*PLAN, "--policy", "8", "--policy", "4", "--memory", "1KiB"), 1),
    "plan_ranks": ((*PLAN, "--policy", "bnb8", "--fsdp", "4"), 0),
    "inspect": (("inspect", "ours.pt"), 0),
    "inspect_states": (("inspect", "ours.pt", "--states"), 0),
    "inspect_torch": (("inspect", "torch.pt"), 0),
    "inspect_damaged": (("inspect", "damaged.pt"), 1),
    "convert": (("convert", "torch.pt", "converted.pt", "--policy", "4"), 0),
    "report": (("report", "run.jsonl"), 0),
    "report_exceeded": (("report", "exceeded.jsonl"), 1),
    "formats": (("formats",), 0),
    "doctor": (("doctor",), 0),
    "train": (("train", "--model", "vit", "--steps", "1"), 0),
    "demo": (("demo",), 0),
    "calibrate": (("calibrate", "--models", "gpt2,vit"), 0),
}

RUNS = [
    {
        "model": "vit",
        "optimizer": optimizer,
        "seed": 0,
        "steps": 2,
        "parameters": 1000,
        "loss": loss,
        "state_bytes": size,
        "true_bits": 8 * size / 2000,
        "curve": {"steps": [1, 2], "losses": [2 * loss, loss]},
    }
    for optimizer, loss, size in (("torch AdamW", 0.5, 8000), ("STQuant 4", 0.53125, 1000))
]
"""Results of a demo that nobody ran."""


def _probes() -> list[Probe]:
    """Return probes that nobody made: damages of three factors and some noise."""
    generator = torch.Generator().manual_seed(0)
    cells = [(model, i, state, name) for model in ("gpt2", "vit") for i in range(8) for state in PROBED
             for name in PROBED[state]]  # fmt: skip
    made = []
    for model, tensor, state, name in cells:
        values = torch.randn(len(NAMES), generator=generator, dtype=torch.float64).exp().tolist()
        factors = dict(zip(NAMES, values, strict=True))
        noise = 1 + 0.1 * float(torch.rand((), generator=generator))
        damage = noise * factors["update_error"] * factors["gradient_rms"] ** 0.5 * factors["crest"] ** 0.25
        made.append(Probe(model, 60, f"layer{tensor}", state, name, damage, damage / 10, damage**2, factors))
    return made


@functools.cache
def _findings() -> Any:
    return findings(Settings(models=("gpt2", "vit")), _probes())


NUMBERS_OF_A_MACHINE = {
    "doctor": r"(stquant|torch|python|processor|threads) [^,\s]+",
    "train": r"(loss) \d+\.\d+",
    "convert": r"(parameters,) [\d,]+",
}
"""What differs between machines and versions, after a word; stars stand for it in the files."""


@functools.cache
def _formats() -> Any:
    return describe()


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with checkpoints, and recorded answers where a real one takes minutes or a machine."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor, "explain", lambda: [Explanation("reference", True, True, "all", "always there")])
    monkeypatch.setattr(formats, "describe", _formats)
    monkeypatch.setattr(demo, "compare", lambda jobs, progress: Comparison(RUNS))
    monkeypatch.setattr(calibrate, "run", lambda settings, progress, kept: _probes())
    monkeypatch.setattr(calibrate, "findings", lambda settings, made: _findings())
    params = parameters([(64, 128), (40, 160), (130,)])
    policy = stquant.Fixed(exp_avg="dynamic2", exp_avg_sq="log1")
    ours, theirs = stquant.AdamW(params, policy=policy), torch.optim.AdamW(params)
    for optimizer in (ours, theirs):
        run(optimizer, params, gradients(params, 2))
    torch.save({"optimizer": ours.state_dict()}, "ours.pt")
    torch.save(theirs.state_dict(), "torch.pt")
    damaged = ours.state_dict()
    damaged["state"][0]["exp_avg"]["scales"][0] = float("nan")
    torch.save(damaged, "damaged.pt")
    for name, budget in (("run", 2000), ("exceeded", 1100)):
        logs.write(Path(f"{name}.jsonl"), logs.decisions(budget), [(1, 5.0), (45, 0.5)])


@pytest.mark.parametrize("name", COMMANDS)
def test_text(name: str, request: pytest.FixtureRequest) -> None:
    arguments, code = COMMANDS[name]
    shown = _run(arguments, code)
    if name in NUMBERS_OF_A_MACHINE:
        shown = re.sub(NUMBERS_OF_A_MACHINE[name], r"\1 ***", shown)
    _compare(GOLDEN / f"{name}.txt", "\n".join(line.rstrip() for line in shown.splitlines()) + "\n", request)


@pytest.mark.parametrize("name", COMMANDS)
def test_json_is_as_its_schema_says(name: str) -> None:
    arguments, code = COMMANDS[name]
    schema = json.loads((SCHEMAS / f"{arguments[0]}.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(json.loads(_run((*arguments, "--json"), code)), schema)


def test_every_command_is_here_and_has_a_schema() -> None:
    commands = set(get_command(app).commands)  # type: ignore[attr-defined]
    assert {arguments[0] for arguments, _ in COMMANDS.values()} == commands
    assert {path.stem for path in SCHEMAS.glob("*.json")} == commands


def test_the_page_of_commands_is_what_they_say(request: pytest.FixtureRequest) -> None:
    _compare(ROOT / "docs" / "commands.md", _page(), request)


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["plann", "gpt2"], "plan"),
        (["inspct", "ours.pt"], "inspect"),
        (["plan", "gpt2", "--memry", "24GB"], "--memory"),
        (["doctor", "--jsn"], "--json"),
        (["plan", "gpt2-medum"], "did you mean gpt2-medium"),
        (["plan", "gpt2", "--memory", "24 gigs"], "24GB"),
        (["plan", "gpt2", "--policy", "bnb4"], "did you mean bnb8"),
        (["plan", "gpt2", "--policy", "adaptve"], "did you mean adaptive?"),
        (["plan", "gpt2", "--policy", "mulaw44+log3"], "did you mean mulaw4"),
        (["plan", "gpt2", "--policy", "7"], "use one of"),
        (["plan", "gpt2", "--dtype", "bloat16"], "'bfloat16'"),
        (["plan", "gpt2", "--fsdp", "0"], "greater than or equal to 1"),
        (["train"], "--model"),
        (["train", "--model", "vti"], "vit"),
        (["train", "--model", "vit", "--policy", "troch"], "did you mean torch"),
        (["train", "--model", "vit", "--policy", "loin:4"], "did you mean lion?"),
        (["calibrate", "--models", "gtp2"], "did you mean gpt2?"),
        (["convert", "torch.pt", "new.pt", "--policy", "solo24"], "did you mean solo42?"),
        (["convert", "torch.pt", "new.pt", "--to", "trch"], "'torch'"),
        (["convert", "torch.pt", "ours.pt"], "ours.pt exists already"),
        (["report", "ours.pt"], "is this a run log?"),
        (["demo", "--steps", "0"], "greater than or equal to 1"),
        (["formats", "more"], "unexpected extra argument"),
        (["inspect", "nowhere.pt"], "nowhere.pt"),
        (["inspect", "ours.pt", "--entry", "optim"], "it has optimizer"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_misuse_exits_with_two_and_says_what_is_meant(arguments: list[str], hint: str) -> None:
    assert hint in " ".join(_run(arguments, 2).split())


OPTIONS = [
    (name, option)
    for name, command in get_command(app).commands.items()  # type: ignore[attr-defined]
    for param in command.params
    for option in param.opts
    if option.startswith("--") and len(option) > len("--log") and option != "--help"
]


@pytest.mark.parametrize(("command", "option"), OPTIONS, ids=lambda value: value)
def test_a_misspelt_option_is_told_the_right_one(command: str, option: str) -> None:
    misspelt = option[:-2] + option[-1]
    assert re.search(rf"No such option:? {misspelt} .*{option}", " ".join(_run((command, misspelt), 2).split()))


def _run(arguments: Any, code: int) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == code, result.output
    return result.output


def _compare(path: Path, shown: str, request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--overwrite"):
        path.write_text(shown)
    assert shown == path.read_text(), f"{path} differs; if that is right, pytest tests/cli --overwrite"


def _page() -> str:
    """Return the commands' page: for each its purpose, its call, its arguments and its options."""
    lines = ["# Commands", "", "Made from the commands themselves. Exit status: 0 fine, 1 a finding, 2 misuse.", ""]
    for name, command in get_command(app).commands.items():  # type: ignore[attr-defined]
        context = command.make_context(name, [], resilient_parsing=True)
        pieces = " ".join(command.collect_usage_pieces(context))
        lines += [f"## `stquant {name}`", "", command.help, "", f"`stquant {name} {pieces}`", ""]
        lines += ["| argument | meaning |", "| --- | --- |"]
        lines += [f"| `{call}` | {text} |" for call, text in _parameters(command, context)]
        lines += ["", f"JSON: [schemas/{name}.json](schemas/{name}.json)", ""]
    return "\n".join(lines)


def _parameters(command: Any, context: Any) -> list[tuple[str, str]]:
    records = [param.get_help_record(context) for param in command.params]
    return [(_cell(call), _cell(text)) for call, text in filter(None, records)]


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|")
