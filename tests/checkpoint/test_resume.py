"""Saving and continuing gives the same bits as not stopping."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

import stquant
from stquant.codecs import catalog
from tests.cases import NON_NEGATIVE, SIGNED, name
from tests.optim.helpers import POLICIES, SHAPES, gradients, parameters, run, same, snapshot


def through_file(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Save and load with torch's defaults, that is with `weights_only=True`."""
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file)
    return loaded


def clone(params: list[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(p.detach().clone()) for p in params]


def check(
    policy: Any,
    dtype: torch.dtype = torch.float32,
    master_bits: Any = "auto",
    before: int = 3,
    after: int = 3,
    shapes: Any = SHAPES,
    seed: int = 0,
    cls: Any = stquant.AdamW,
    **options: Any,
) -> None:
    params = parameters(shapes, dtype)
    make = {"policy": policy, "master_bits": master_bits, "seed": seed, "lr": 1e-2, **options}
    straight = cls(params, **make)
    grads = list(gradients(params, before + after))
    run(straight, params, grads[:before])
    saved, weights = through_file(straight.state_dict()), clone(params)
    # Everything but the file differs, as in a fresh process with other settings.
    resumed = cls(weights, lr=1.0, policy="fp32" if policy != "fp32" else stquant.Fixed(4), seed=99)
    resumed.load_state_dict(saved)
    assert same(snapshot(straight, params), snapshot(resumed, weights))
    run(straight, params, grads[before:])
    run(resumed, weights, grads[before:])
    assert same(snapshot(straight, params), snapshot(resumed, weights))


@pytest.mark.parametrize("format", SIGNED, ids=name)
def test_every_momentum_format(format: stquant.codecs.format.Format) -> None:
    check(stquant.Fixed(exp_avg=format.name, exp_avg_sq="log1"))


@pytest.mark.parametrize("format", NON_NEGATIVE, ids=name)
def test_every_average_of_squares_format(format: stquant.codecs.format.Format) -> None:
    check(stquant.Fixed(exp_avg="dynamic2", exp_avg_sq=format.name))


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
@pytest.mark.parametrize("master_bits", [0, 3, 8, 16, "auto"])
def test_bfloat16_with_residuals(policy: Any, master_bits: Any) -> None:
    check(policy, torch.bfloat16, master_bits)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    check(stquant.Fixed(4), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("cls", "policy", "options"),
    [
        (stquant.Adam, stquant.Fixed(exp_avg=3, exp_avg_sq=2), {"weight_decay": 0.1}),
        (stquant.SGD, stquant.Fixed(bits=2), {"momentum": 0.9, "nesterov": True}),
        (stquant.SGD, "fp32", {}),
        (stquant.SGD, stquant.Fixed(bits=8), {"momentum": 0.9, "dampening": 0.5}),
        (stquant.Lion, stquant.Fixed(bits=4), {"weight_decay": 0.1}),
    ],
)
def test_other_optimizers(cls: Any, policy: Any, options: dict[str, Any], dtype: torch.dtype) -> None:
    check(policy, dtype, cls=cls, **options)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_plain_sgd_checkpoints_load(momentum: float) -> None:
    params = parameters()
    theirs = torch.optim.SGD(params, lr=1e-2, momentum=momentum)
    run(theirs, params, gradients(params, 2))
    ours = stquant.SGD(params, policy="fp32")
    ours.load_state_dict(through_file(theirs.state_dict()))
    weights = clone(params)
    continued = torch.optim.SGD(weights, lr=1e-2, momentum=momentum)
    continued.load_state_dict(theirs.state_dict())
    grads = list(gradients(params, 1, seed=4))
    run(ours, params, grads)
    run(continued, weights, grads)
    for a, b in zip(params, weights, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_a_step_count_far_on_continues_far_on() -> None:
    """At step 1,000 bias corrections are long over; a counter that restarts would show."""
    params = parameters([(64, 128)], torch.bfloat16)
    optimizer = stquant.AdamW(params, lr=1e-2)
    run(optimizer, params, gradients(params, 1))
    optimizer.state[params[0]]["step"].fill_(1000)
    saved, weights = through_file(optimizer.state_dict()), clone(params)
    resumed = stquant.AdamW(weights)
    resumed.load_state_dict(saved)
    assert resumed.state[weights[0]]["step"].dtype is torch.float32
    for _ in range(2):
        run(optimizer, params, gradients(params, 1))
        run(resumed, weights, gradients(weights, 1))
    assert same(snapshot(optimizer, params), snapshot(resumed, weights))
    assert resumed.state[weights[0]]["step"] == 1002


def test_formats_that_changed_during_training_are_those_of_the_file() -> None:
    params = parameters()
    optimizer = stquant.AdamW(params, lr=1e-2, policy=stquant.Fixed(exp_avg="dynamic2", exp_avg_sq="log1"))
    grads = list(gradients(params, 9))
    run(optimizer, params, grads[:3])
    for p, widths in zip(params[:2], (("mulaw8", "log3"), ("dynamic3", "log8-stochastic")), strict=True):
        for key, width in zip(("exp_avg", "exp_avg_sq"), widths, strict=True):
            optimizer.state[p][key] = optimizer.state[p][key].recode(catalog.get(width))
    run(optimizer, params, grads[3:5])
    saved, weights = through_file(optimizer.state_dict()), clone(params)
    resumed = stquant.AdamW(weights)
    resumed.load_state_dict(saved)
    assert resumed.state[weights[1]]["exp_avg"].format.name == "dynamic3"
    run(optimizer, params, grads[5:])
    run(resumed, weights, grads[5:])
    assert same(snapshot(optimizer, params), snapshot(resumed, weights))


def test_a_file_of_fp32_parameters_continues_in_bfloat16() -> None:
    params = parameters()
    optimizer = stquant.AdamW(params, lr=1e-2)
    run(optimizer, params, gradients(params, 2))
    halves = [torch.nn.Parameter(p.detach().bfloat16()) for p in params]
    resumed = stquant.AdamW(halves)
    resumed.load_state_dict(through_file(optimizer.state_dict()))
    for p, half in zip(params, halves, strict=True):
        before, after = optimizer.state[p]["exp_avg"], resumed.state[half]["exp_avg"]
        assert torch.equal(getattr(before, "codes", before), getattr(after, "codes", after))
    run(resumed, halves, gradients(halves, 2))
    assert all("residual" in resumed.state[half] for half in halves)


def test_bytes_do_not_grow_with_steps_or_loads() -> None:
    params = parameters(dtype=torch.bfloat16)
    optimizer = stquant.AdamW(params, lr=1e-2)
    sizes = []
    for _ in range(3):
        run(optimizer, params, gradients(params, 1))
        sizes.append(optimizer.ledger().bytes)
        optimizer.load_state_dict(optimizer.state_dict())
        sizes.append(optimizer.ledger().bytes)
    assert len(set(sizes)) == 1


def test_amsgrad() -> None:
    check("fp32", amsgrad=True)


@given(
    before=st.integers(0, 4),
    after=st.integers(1, 3),
    rows=st.integers(1, 40),
    columns=st.integers(1, 300),
    block=st.sampled_from((32, 64, 128, 256)),
    bits=st.sampled_from((2, 3, 4, 5, 6, 8)),
    dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.float16)),
    seed=st.integers(0, 2**40),
)
def test_any_save_point(
    before: int, after: int, rows: int, columns: int, block: int, bits: int, dtype: torch.dtype, seed: int
) -> None:
    shapes = [(rows * 16, columns), (columns,)]
    check(stquant.Fixed(bits, block=block), dtype, "auto", before, after, shapes, seed)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_continue_alike(how: str) -> None:
    params = parameters()
    optimizer = stquant.AdamW(params, lr=1e-2, seed=3)
    run(optimizer, params, gradients(params, 3))
    pair = (params, optimizer)
    other_params, other = copy.deepcopy(pair) if how == "deepcopy" else pickle.loads(pickle.dumps(pair))
    grads = list(gradients(params, 3, seed=5))
    run(optimizer, params, grads)
    run(other, other_params, grads)
    assert same(snapshot(optimizer, params), snapshot(other, other_params))


def test_parameters_that_never_had_a_gradient_or_are_frozen() -> None:
    """Train A alone, freeze it, save, load, unfreeze, train both."""
    outcomes = []
    for stop in (False, True):
        params = parameters([(64, 128), (40, 160)])
        optimizer = stquant.AdamW(params, lr=1e-2)
        grads = list(gradients(params, 6))
        for step in grads[:3]:
            params[0].grad, params[1].grad = step[0].clone(), None
            optimizer.step()
        params[0].requires_grad_(False)
        if stop:
            saved, weights = through_file(optimizer.state_dict()), clone(params)
            weights[0].requires_grad_(False)
            params, optimizer = weights, stquant.AdamW(weights)
            optimizer.load_state_dict(saved)
        params[0].requires_grad_(True)
        run(optimizer, params, grads[3:])
        outcomes.append(snapshot(optimizer, params))
    assert same(*outcomes)


def test_the_presented_form_does_not_depend_on_the_width() -> None:
    shapes = []
    for bits in (2, 3, 4, 8):
        params = parameters()
        optimizer = stquant.AdamW(params, policy=stquant.Fixed(bits))
        optimizer.init_state()
        shapes.append([t.shape for t in snapshot(optimizer, params)])
    assert all(s == shapes[0] for s in shapes)


def test_presented_names_are_the_live_ones_and_hold_plain_values_only() -> None:
    params = parameters(dtype=torch.bfloat16)
    optimizer = stquant.AdamW(params)
    run(optimizer, params, gradients(params, 1))
    state_dict = optimizer.state_dict()
    for live, presented in zip(optimizer.state.values(), state_dict["state"].values(), strict=True):
        assert list(live) == list(presented)
        for value in presented.values():
            for part in value.values() if isinstance(value, dict) else [value]:
                assert type(part) in (torch.Tensor, int)
    for group in state_dict["param_groups"]:
        assert all(type(v) in (int, float, bool, str, tuple, list, type(None)) for v in group.values())
        assert set(group) - set(torch.optim.AdamW(params).param_groups[0]) == {"stquant"}


def test_a_state_dict_is_a_snapshot() -> None:
    params = parameters()
    optimizer = stquant.AdamW(params, lr=1e-2)
    run(optimizer, params, gradients(params, 2))
    saved = optimizer.state_dict()
    frozen = copy.deepcopy(saved)
    run(optimizer, params, gradients(params, 1))
    for a, b in zip(saved["state"].values(), frozen["state"].values(), strict=True):
        for key in a:
            parts = (
                zip(a[key].values(), b[key].values(), strict=True) if isinstance(a[key], dict) else [(a[key], b[key])]
            )
            assert all(torch.equal(torch.as_tensor(x), torch.as_tensor(y)) for x, y in parts)


def test_state_dict_hooks_see_the_presented_form() -> None:
    params = parameters()
    optimizer = stquant.AdamW(params)
    seen = []
    optimizer.register_state_dict_post_hook(lambda _, state: seen.append(type(state["state"][0]["exp_avg"])))
    optimizer.register_load_state_dict_pre_hook(lambda _, state: seen.append(sorted(state)))
    optimizer.register_load_state_dict_post_hook(lambda _: seen.append("loaded"))
    optimizer.init_state()
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == [dict, ["param_groups", "state"], "loaded"]


def test_a_presented_state_written_straight_into_the_optimizer_is_absorbed() -> None:
    outcomes = []
    for bypass in (False, True):
        params = parameters()
        optimizer = stquant.AdamW(params, lr=1e-2)
        grads = list(gradients(params, 4))
        run(optimizer, params, grads[:2])
        if bypass:
            saved = through_file(optimizer.state_dict())["state"]
            for i, p in enumerate(params):
                optimizer.state[p] = saved[i]
        run(optimizer, params, grads[2:])
        outcomes.append(snapshot(optimizer, params))
    assert same(*outcomes)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
def test_plain_torch_checkpoints_load(policy: Any) -> None:
    params = parameters()
    theirs = torch.optim.AdamW(params, lr=1e-2)
    run(theirs, params, gradients(params, 5))
    ours = stquant.AdamW(params, lr=1.0, policy=policy)
    ours.load_state_dict(through_file(theirs.state_dict()))
    assert ours.param_groups[0]["lr"] == 1e-2
    for p in params:
        assert ours.state[p]["step"] == 5
    if policy == "fp32":
        exported = ours.export_state_dict()["state"]
        for i, p in enumerate(params):
            assert torch.equal(exported[i]["exp_avg"], theirs.state[p]["exp_avg"])
    run(ours, params, gradients(params, 2))


def test_exported_checkpoints_load_into_torch() -> None:
    params = parameters()
    ours = stquant.AdamW(params, lr=1e-2, policy=stquant.Fixed(8))
    run(ours, params, gradients(params, 5))
    theirs = torch.optim.AdamW(clone(params))
    theirs.load_state_dict(through_file(ours.export_state_dict()))
    state = theirs.state[theirs.param_groups[0]["params"][0]]
    assert torch.equal(state["exp_avg"], ours.state[params[0]]["exp_avg"].decode())
    run(theirs, theirs.param_groups[0]["params"], gradients(params, 1))
