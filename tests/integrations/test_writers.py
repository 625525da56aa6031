"""What writers write: numbers by hand here, real trackers in processes of their own."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from stquant.integrations import scalars
from stquant.report import runlog
from tests.integrations.forks import Forks
from tests.report import runs

writers = pytest.mark.skipif(not find_spec("tensorboard") or not find_spec("wandb"), reason="needs tensorboard, wandb")


def test_numbers_of_decisions_by_hand() -> None:
    first, _, last = runs.decisions(budget=1400)
    held = 8 * (544 + 160 + 288 + 160) / (4 * 1024)
    assert scalars.of_decisions([first]) == {
        "bytes": 8 + 544 + 160 + 288 + 160,
        "budget": 1400,
        "bits": held,
        "damage": (1.0 + 1.0 + 2.5 + 1.0) / 100,
        "damage_measured": 4 * 2.0 / 100,
        "changed": 1,
    }
    states = scalars.of_states([last])
    assert states["bits/wte & <b>head/exp_avg"] == 8 * 416 / 1024
    assert len(states) == 4


def test_several_policies_are_added_up_and_the_worst_damage_counts() -> None:
    first, second, _ = runs.decisions(budget=1400)
    both = scalars.of_decisions([first, second])
    assert both["bytes"] == first.bytes + second.bytes
    assert both["budget"] == 2800
    assert both["damage"] == max(scalars.of_decisions([d])["damage"] for d in (first, second))
    assert both["changed"] == 0, "the one that changed something is older"
    assert "budget" not in scalars.of_decisions([first, runs.decisions(budget=None)[1]])


def test_what_was_not_measured_is_left_out() -> None:
    decision = runs.decisions()[0]
    unmeasured = runs.state("h.1", "exp_avg", "dynamic2", "dynamic2", factors={})
    partly = type(decision)(10, decision.policy, None, 1, 100.0, (*decision.states, unmeasured))
    assert "damage_measured" not in scalars.of_decisions([partly])


def test_numbers_of_a_log_are_in_order(tmp_path: Path) -> None:
    taken = runs.decisions()
    log = runlog.read(runs.write(tmp_path / "run.jsonl", taken, [(5, 2.0), (10, 1.5)]))
    found = dict(scalars.of_log(log, states=True))
    assert list(found) == [5, 10, 20, 40]
    assert found[5] == {"loss": 2.0}
    assert found[10] == {"loss": 1.5, **scalars.of_decisions(taken[:1]), **scalars.of_states(taken[:1])}


def test_numbers_of_an_optimizer() -> None:
    params, optimizer = runs.toy()
    runs.steps(optimizer, params, 1, 1)
    ledger = optimizer.ledger()
    expected = {"state_bytes": ledger.bytes, "state_bits": ledger.bits}
    assert scalars.of_optimizer(optimizer) == expected, "no decision yet"
    runs.steps(optimizer, params, 2, 2)
    assert scalars.of_optimizer(optimizer)["state_damage"] > 0


@writers
def test_tensorboard(forks: Forks, tmp_path: Path) -> None:
    forks("writing.tensorboard", tmp_path)


@writers
def test_weights_and_biases(forks: Forks, tmp_path: Path) -> None:
    forks("writing.weights_and_biases", tmp_path)


@writers
def test_what_writers_refuse(forks: Forks, tmp_path: Path) -> None:
    twice, foreign = forks("writing.misused", tmp_path)
    assert twice == "this writer is attached to an optimizer; close it, or make another one"
    assert foreign.startswith("the optimizer is torch.optim.sgd.SGD, which has no ledger")


@writers
def test_a_missing_package_says_what_to_install(forks: Forks) -> None:
    said = forks("writing.missing")
    extras = {"transformers": "trainers", "lightning": "trainers", "tensorboard": "writers", "wandb": "writers"}
    assert said.keys() == extras.keys()
    for package, extra in extras.items():
        assert said[package].startswith(f"{package} cannot be imported")
        assert said[package].endswith(f"pip install 'stquant[{extra}]'")
