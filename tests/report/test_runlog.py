"""The run log: what is in it, and that neither a kill nor a resume harms it."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stquant import AdamW
from stquant.policy.budget import Budget
from stquant.policy.decision import Decision
from stquant.report.runlog import DIGITS, RunLog, read
from tests.optim.helpers import parameters
from tests.report import runs

ROUNDING = 0.5 * 10.0 ** (1 - DIGITS)
"""The file keeps that many digits."""


def test_the_log_holds_every_decision_and_loss(tmp_path: Path) -> None:
    params, optimizer = runs.toy()
    taken: list[Decision] = []
    with RunLog(tmp_path / "run.jsonl").attach(optimizer) as log:
        for step in range(1, 9):
            runs.steps(optimizer, params, step, step)
            taken += [decision for decision in optimizer.decisions() if decision.step == step]
            log.loss(step, 1 / step)
    found = read(tmp_path / "run.jsonl")
    assert found.header["optimizer"] == "AdamW"
    assert found.header["parameters"] == {"body.weight": [64, 128], "body.bias": [130], "head.weight": [40, 160]}
    assert found.header["conditions"]["packages"]["torch"]
    assert [decision.step for decision in found.decisions] == [2, 4, 6, 8]
    assert any(part.old != part.new for decision in taken for part in decision.states)
    assert found.losses == tuple((step, pytest.approx(1 / step, rel=ROUNDING)) for step in range(1, 9))
    for read_back, decision in zip(found.decisions, taken, strict=True):
        assert read_back.to_dict() == _rounded(decision.to_dict())


def _rounded(value: Any) -> Any:
    """What `value` must be after its numbers lost digits; lists and dicts by part."""
    if isinstance(value, dict):
        return {key: _rounded(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_rounded(part) for part in value]
    return pytest.approx(value, rel=ROUNDING) if isinstance(value, float) else value


def test_after_the_log_is_closed_nothing_more_is_written(tmp_path: Path) -> None:
    params, optimizer = runs.toy()
    path = tmp_path / "run.jsonl"
    with RunLog(path).attach(optimizer):
        runs.steps(optimizer, params, 1, 2)
    before = path.read_bytes()
    runs.steps(optimizer, params, 3, 4)
    assert path.read_bytes() == before


@pytest.mark.parametrize("torn", ["", '{"kind":"decision","step":9,"deci'], ids=["whole", "torn"])
def test_a_resumed_run_writes_the_file_of_one_that_never_stopped(tmp_path: Path, torn: str) -> None:
    whole, resumed = tmp_path / "whole.jsonl", tmp_path / "resumed.jsonl"
    params, optimizer = runs.toy()
    with RunLog(whole).attach(optimizer) as log:
        for step in range(1, 13):
            runs.steps(optimizer, params, step, step)
            log.loss(step, 1 / step)

    params, optimizer = runs.toy()
    log = RunLog(resumed).attach(optimizer)
    for step in range(1, 10):  # saved after step 5, killed after step 9
        runs.steps(optimizer, params, step, step)
        log.loss(step, 1 / step)
        if step == 5:
            saved, weights = optimizer.state_dict(), [param.detach().clone() for param in params]
    log.close()
    with resumed.open("a") as file:
        file.write(torn)

    params, optimizer = runs.toy()
    with torch.no_grad():
        for param, weight in zip(params, weights, strict=True):
            param.copy_(weight)
    optimizer.load_state_dict(saved)
    with RunLog(resumed).attach(optimizer) as log:
        for step in range(6, 13):
            runs.steps(optimizer, params, step, step)
            log.loss(step, 1 / step)
    assert resumed.read_text() == whole.read_text()


KILLED = """
import os, signal, sys
from stquant.report.runlog import RunLog
from tests.report import runs
params, optimizer = runs.toy()
log = RunLog(sys.argv[1]).attach(optimizer)
runs.steps(optimizer, params, 1, 5)
log.loss(5, 0.25)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_run_has_written_all_that_it_knew(tmp_path: Path) -> None:
    path, root = tmp_path / "run.jsonl", Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", KILLED, path], cwd=root, capture_output=True, text=True)
    assert done.returncode == -9, done.stderr
    found = read(path)
    assert [decision.step for decision in found.decisions] == [2, 4]
    assert found.losses == ((5, 0.25),)


def test_each_policy_has_its_decisions(tmp_path: Path) -> None:
    params = parameters(((64, 128), (40, 160)))
    groups = [{"params": params[:1]}, {"params": params[1:], "policy": Budget(bits=4.0, every=4)}]
    optimizer = AdamW(groups, policy=Budget(bits=3.0, every=2))
    with RunLog(tmp_path / "run.jsonl").attach(optimizer):
        runs.steps(optimizer, params, 1, 4)
    found = read(tmp_path / "run.jsonl").decisions
    assert [(d.step, d.policy) for d in found if "every=2" in d.policy] == [
        (2, "Budget(bits=3.0, every=2)"),
        (4, "Budget(bits=3.0, every=2)"),
    ]
    assert [d.step for d in found if "every=4" in d.policy][-1] == 4


def test_an_optimizer_without_decisions_has_losses(tmp_path: Path) -> None:
    params = parameters()
    optimizer = torch.optim.AdamW(params)
    with RunLog(tmp_path / "run.jsonl").attach(optimizer) as log:
        runs.steps(optimizer, params, 1, 2)
        log.loss(2, 3.0)
    found = read(tmp_path / "run.jsonl")
    assert (found.decisions, found.losses) == ((), ((2, 3.0),))


def test_what_is_not_finite_is_null_in_the_file_and_nan_when_read(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    _, optimizer = runs.toy()
    part = runs.state("body.weight", "exp_avg", "dynamic2", "mulaw4", measured=math.inf, factors={"crest": math.nan})
    decision = replace(runs.decisions()[0], step=1, moved=math.nan, states=(part,))
    optimizer.decisions = lambda: (decision,)  # type: ignore[method-assign, assignment, return-value]
    with RunLog(path).attach(optimizer) as log:
        optimizer.step()
        log.loss(1, math.inf)
    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    found = read(path)
    values = (found.losses[0][1], found.decisions[0].moved, found.decisions[0].states[0].measured)
    assert all(map(math.isnan, (*values, found.decisions[0].states[0].factors["crest"])))


BAD = {
    "not JSON": ("step, loss\n", "line 1: not JSON"),
    "empty": ("", "not a run log"),
    "only a torn line": ('{"kind":"run","sch', "not a run log"),
    "no header": ('{"kind":"loss","step":1,"loss":2.0}\n', "not a run log"),
    "a newer version": ('{"kind":"run","schema":2}\n', "version 2; this version of stquant reads 1"),
    "damaged in the middle": ('{"kind":"run","schema":1}\n{"kind":"lo\n{"kind":"loss","step":2}\n', "line 2: not JSON"),
    "no step": ('{"kind":"run","schema":1}\n{"kind":"loss"}\n', "line 2: not a line of a run log"),
    "half a decision": (
        '{"kind":"run","schema":1}\n{"kind":"decision","step":1,"decision":{"step":1}}\n',
        "line 2: not a decision",
    ),
}


@pytest.mark.parametrize(("text", "message"), BAD.values(), ids=BAD.keys())
def test_what_is_no_run_log_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read(path)


def test_a_log_of_another_run_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    params, optimizer = runs.toy()
    with RunLog(path).attach(optimizer):
        runs.steps(optimizer, params, 1, 2)
    before = path.read_bytes()
    for other, message in (
        (runs.toy()[1], "up to step 2, but this optimizer has taken no step"),
        (AdamW(parameters()), "other parameters"),
        (torch.optim.SGD(params), "other optimizer"),
    ):
        with pytest.raises(ValueError, match=message):
            RunLog(path).attach(other)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_log_is_attached_once_and_before_it_is_written(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "run.jsonl")
    with pytest.raises(RuntimeError, match="call attach"):
        log.loss(1, 2.0)
    with log.attach(runs.toy()[1]), pytest.raises(RuntimeError, match="close it before"):
        log.attach(runs.toy()[1])
