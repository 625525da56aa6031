"""A file that does not fit raises with the parameter's name and changes nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import stquant
from tests.optim.helpers import gradients, parameters, run, same, snapshot

State = dict[str, Any]


def _set(path: str, value: Any) -> Callable[[State], None]:
    def change(state_dict: State) -> None:
        *parents, last = path.split(".")
        target: Any = state_dict["state"][1]
        for key in parents:
            target = target[key]
        target[last] = value(target[last]) if callable(value) else value

    return change


def _drop(path: str) -> Callable[[State], None]:
    def change(state_dict: State) -> None:
        *parents, last = path.split(".")
        target: Any = state_dict["state"][1]
        for key in parents:
            target = target[key]
        del target[last]

    return change


def _first(value: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    return _at(0, value)


def _at(place: int, value: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        tensor.view(-1)[place] = value
        return tensor

    return change


CORRUPT = {
    "no step": (_drop("step"), "state lacks 'step'"),
    "negative step": (_set("step", torch.tensor(-1.0)), "step is -1"),
    "broken step": (_set("step", torch.tensor(0.5)), "step is 0.5, expected an integer"),
    "no momentum": (_drop("exp_avg"), "state lacks 'exp_avg'"),
    "no codes": (_drop("exp_avg.codes"), "exp_avg lacks 'codes'"),
    "no scales": (_drop("exp_avg_sq.scales"), "exp_avg_sq lacks 'scales'"),
    "truncated codes": (_set("exp_avg.codes", lambda t: t[:-1]), r"exp_avg.codes has shape \(39, 160\)"),
    "cast codes": (_set("exp_avg.codes", lambda t: t.float()), "exp_avg.codes has dtype torch.float32"),
    "cast scales": (_set("exp_avg.scales", lambda t: t.bfloat16()), "exp_avg.scales has dtype torch.bfloat16"),
    "too many bits": (_set("exp_avg.codes", _at(127, 1)), "exp_avg.codes holds more than 2 bits per code"),
    "bits of a short block": (_set("exp_avg.codes", _at(159, 1)), "exp_avg.codes holds more than 2 bits per code"),
    "wrong blocks": (_set("exp_avg.scales", lambda t: t[:, :1]), r"exp_avg.scales has shape \(40, 1\)"),
    "infinite scale": (_set("exp_avg.scales", _first(float("inf"))), "exp_avg.scales holds non-finite values"),
    "negative mean": (_set("exp_avg_sq.scales", _first(-1.0)), "exp_avg_sq.scales holds negative values"),
    "unknown format": (_set("exp_avg.format", 77), "format number 77 is unknown"),
    "misplaced format": (_set("exp_avg.format", 24), "has format 'log4', which does not fit this state"),
    "wrong block": (_set("exp_avg.block", 100), "block=100 is not a power of two"),
    "blocks that differ": (_set("exp_avg_sq.block", 256), "scales has shape|blocks of"),
    "wild octaves": (_set("exp_avg_sq.lo", 500), "exp_avg_sq.lo is 500, expected -64 to 64"),
    "text": (_set("exp_avg", "gone"), "exp_avg is str, expected a tensor"),
    "unknown entry": (lambda s: s["state"][1].update(exp_inf=0), "holds exp_inf"),
    "residual": (
        lambda s: s["state"][1].update(
            residual={"values": torch.zeros(40, 160, 2, dtype=torch.uint8), "bits": 8, "block": 128}
        ),
        "8-bit residual of a bfloat16 parameter, the parameter is torch.float32",
    ),
    "stranger": (lambda s: s["state"].update({17: s["state"][1]}), "states .'17'. of no parameter"),
    "lost parameter": (
        lambda s: s["param_groups"][0]["params"].pop(),
        r"groups of \[5\] parameters, this optimizer of \[6\]",
    ),
    "lost group": (lambda s: s["param_groups"].clear(), r"groups of \[\] parameters"),
    "broken group": (lambda s: s["param_groups"][0].update(stquant="{"), "group key 'stquant' cannot be read"),
    "later schema": (lambda s: s["param_groups"][0].update(stquant='{"version": 2}'), "schema version 2"),
    "impossible option": (lambda s: s["param_groups"][0].update(amsgrad=True), "amsgrad=True needs policy='fp32'"),
}


@pytest.mark.parametrize(("corrupt", "message"), CORRUPT.values(), ids=CORRUPT.keys())
def test_a_bad_file_changes_nothing(corrupt: Callable[[State], None], message: str) -> None:
    params = parameters()
    named = [(f"layer{i}.weight", p) for i, p in enumerate(params)]
    optimizer = stquant.AdamW(named, lr=1e-2)
    run(optimizer, params, gradients(params, 2))
    bad = copy.deepcopy(optimizer.state_dict())
    corrupt(bad)
    run(optimizer, params, gradients(params, 1))
    before, groups = snapshot(optimizer, params), copy.deepcopy(optimizer.param_groups)
    with pytest.raises(ValueError, match=message) as caught:
        optimizer.load_state_dict(bad)
    if "nothing was loaded" in str(caught.value) and "of no parameter" not in message and "groups of" not in message:
        assert "layer1.weight" in str(caught.value)
    assert same(snapshot(optimizer, params), before)
    for old, new in zip(groups, optimizer.param_groups, strict=True):
        assert {k: v for k, v in old.items() if k != "params"} == {k: v for k, v in new.items() if k != "params"}


def test_negative_zero_codes_are_refused() -> None:
    params = parameters([(64, 128)])
    optimizer = stquant.AdamW(params, policy=stquant.Fixed(4))
    optimizer.init_state()
    bad = optimizer.state_dict()
    bad["state"][0]["exp_avg"]["codes"][0, 0] = 8
    with pytest.raises(stquant.CheckpointError, match="negative zero, which 'mulaw4' never writes"):
        optimizer.load_state_dict(bad)


def test_residuals_must_fit_their_bits() -> None:
    """A matrix's residual has the blocks of its states, a vector's has a value per element."""
    params = parameters([(64, 128), (131,)], torch.bfloat16)
    optimizer = stquant.AdamW(params, master_bits=4)
    optimizer.init_state()
    for index, part, message in (
        (0, "codes", "residual.codes holds more than 4 bits per code"),
        (1, "values", "not multiples of 4096, as 4 bits need"),
    ):
        bad = optimizer.state_dict()
        bad["state"][index]["residual"][part].view(-1)[254] = 5
        with pytest.raises(stquant.CheckpointError, match=message):
            optimizer.load_state_dict(bad)


def test_plain_files_with_non_finite_states_are_refused() -> None:
    params = parameters([(64, 128)])
    theirs = torch.optim.AdamW(params)
    run(theirs, params, gradients(params, 1))
    theirs.state[params[0]]["exp_avg"][0, 0] = float("nan")
    with pytest.raises(stquant.CheckpointError, match="exp_avg holds non-finite values, which 'dynamic2' cannot store"):
        stquant.AdamW(params).load_state_dict(theirs.state_dict())


def test_the_file_is_not_changed_and_shares_no_memory() -> None:
    params = parameters()
    optimizer = stquant.AdamW(params, lr=1e-2)
    run(optimizer, params, gradients(params, 2))
    file = optimizer.state_dict()
    copied = copy.deepcopy(file)
    optimizer.load_state_dict(file)
    run(optimizer, params, gradients(params, 1))
    assert str(file) == str(copied)
