"""The packed form of a state dict: smaller, the same bits, and loaded wherever the default form is."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch

import stquant
from stquant.checkpoint.convert import to_torch
from stquant.distributed import tensors
from tests.cases import NON_NEGATIVE, RECIPES, SIGNED, name
from tests.checkpoint.test_resume import clone, through_file
from tests.optim.helpers import gradients, parameters, run, same, snapshot

SHAPES = ((64, 128), (33, 129), (8, 4, 6, 6), (130,), (0, 5))


def trained(**options: Any) -> tuple[Any, list[torch.nn.Parameter]]:
    params = parameters(SHAPES, torch.bfloat16)
    optimizer = stquant.AdamW(params, lr=1e-2, **options)
    run(optimizer, params, gradients(params, 2))
    return optimizer, params


def check(**options: Any) -> None:
    optimizer, params = trained(**options)
    weights = clone(params)
    resumed = stquant.AdamW(weights, policy="fp32", seed=99)
    resumed.load_state_dict(through_file(optimizer.state_dict(packed=True)))
    assert same(snapshot(optimizer, params), snapshot(resumed, weights))
    grads = list(gradients(params, 2, seed=5))
    run(optimizer, params, grads)
    run(resumed, weights, grads)
    assert same(snapshot(optimizer, params), snapshot(resumed, weights))


@pytest.mark.parametrize("format", [*SIGNED, *NON_NEGATIVE, *RECIPES], ids=name)
def test_every_format_continues_bit_for_bit(format: Any) -> None:
    state = "exp_avg" if format.signed else "exp_avg_sq"
    check(policy=stquant.Fixed(**{state: format.name}, block=format.block))


@pytest.mark.parametrize("master_bits", [0, 1, 3, 8, 16])
def test_every_residual_continues_bit_for_bit(master_bits: int) -> None:
    check(master_bits=master_bits)


def test_codes_are_the_live_bytes_and_share_no_memory() -> None:
    optimizer, params = trained()
    presented = optimizer.state_dict(packed=True)["state"]
    for index, param in enumerate(params):
        for key, value in presented[index].items():
            live = optimizer.state[param][key]
            if isinstance(value, dict):
                assert torch.equal(value["packed"], live.codes)
                assert not live.codes.numel() or value["packed"].data_ptr() != live.codes.data_ptr()
                assert value["shape"] == list(param.shape)
    assert "codes" in optimizer.state_dict()["state"][0]["exp_avg"]


def test_it_may_be_written_straight_into_the_optimizer() -> None:
    optimizer, params = trained()
    weights = clone(params)
    resumed = stquant.AdamW(weights, lr=1e-2)
    for index, saved in optimizer.state_dict(packed=True)["state"].items():
        resumed.state[weights[index]] = saved
    grads = list(gradients(params, 1, seed=5))
    run(optimizer, params, grads)
    run(resumed, weights, grads)
    assert same(snapshot(optimizer, params), snapshot(resumed, weights))


def test_it_converts_to_torch_as_the_default_form_does() -> None:
    optimizer, _ = trained()
    plain, packed = (to_torch(optimizer.state_dict(packed=form))["state"] for form in (False, True))
    for index, state in plain.items():
        assert all(torch.equal(value, packed[index][key]) for key, value in state.items())


def _change(part: str, key: str, value: Any) -> Callable[[Any], None]:
    def change(state: Any) -> None:
        state[part][key] = value(state[part][key])

    return change


CORRUPT = {
    "truncated": (_change("exp_avg", "packed", lambda t: t[:-1]), r"exp_avg.packed has shape \(63, 32\), expected"),
    "cast": (_change("exp_avg", "packed", lambda t: t.float()), "exp_avg.packed has dtype torch.float32"),
    "another shape": (_change("exp_avg", "shape", lambda s: s[::-1]), r"exp_avg.shape is \[128, 64\], expected"),
    "no shape": (lambda s: s["exp_avg"].pop("shape"), "exp_avg lacks 'shape'"),
    "shape of text": (_change("exp_avg_sq", "shape", lambda s: "64"), "exp_avg_sq.shape is '64', expected"),
    "residual": (_change("residual", "packed", lambda t: t[:, :-1]), r"residual.packed has shape \(64, 127\)"),
    "other bits": (_change("residual", "bits", lambda b: 4), r"residual.packed has shape \(64, 128\), expected"),
}


@pytest.mark.parametrize(("corrupt", "message"), CORRUPT.values(), ids=CORRUPT.keys())
def test_a_bad_file_changes_nothing(corrupt: Callable[[Any], None], message: str) -> None:
    optimizer, params = trained()
    bad = copy.deepcopy(optimizer.state_dict(packed=True))
    corrupt(bad["state"][0])
    before = snapshot(optimizer, params)
    with pytest.raises(stquant.CheckpointError, match=f"parameter 'group 0 / 0': {message}"):
        optimizer.load_state_dict(bad)
    assert same(snapshot(optimizer, params), before)


def test_codes_that_the_format_never_writes_are_refused() -> None:
    optimizer, _ = trained(policy=stquant.Fixed(4))
    bad = optimizer.state_dict(packed=True)
    bad["state"][0]["exp_avg"]["packed"].fill_(0x88)
    with pytest.raises(stquant.CheckpointError, match="negative zero, which 'mulaw4' never writes"):
        optimizer.load_state_dict(bad)


def test_sharded_parameters_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer, params = trained()
    monkeypatch.setattr(tensors, "is_distributed", lambda value: value is params[0])
    with pytest.raises(ValueError, match="is a DTensor, and a packed file holds whole tensors only"):
        optimizer.state_dict(packed=True)


@pytest.mark.parametrize("policy", ["default", stquant.Fixed(4)])
def test_files_of_16_bit_models_take_two_fifths_of_fp32(policy: Any) -> None:
    """Weights and optimizer together, as `torch.save` writes them."""

    def size(optimizer: Any, params: Any, **form: Any) -> int:
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
        file = io.BytesIO()
        torch.save({"model": list(params), "optimizer": optimizer.state_dict(**form)}, file)
        return len(file.getvalue())

    theirs, ours = parameters([(512, 768)]), parameters([(512, 768)], torch.bfloat16)
    options = {} if policy == "default" else {"policy": policy}
    packed = size(stquant.AdamW(ours, **options), ours, packed=True)
    assert packed <= 0.4 * size(torch.optim.AdamW(theirs), theirs)
