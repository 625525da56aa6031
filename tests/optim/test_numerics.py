"""Zeros, infinities, very large and very small gradients, and steps that change nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import stquant
from tests.optim.helpers import POLICIES, gradients, parameters, run, same, snapshot

PACKED = {key: policy for key, policy in POLICIES.items() if key in ("default", "4", "8", "3, prepaid", "nearest v")}


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("policy", PACKED.values(), ids=PACKED.keys())
def test_a_non_finite_gradient_spoils_its_own_weight_only(policy: stquant.Fixed, bad: float) -> None:
    """Its neighbours step as if it were zero."""
    outcomes = []
    for value in (bad, 0.0):
        params = parameters([(64, 128)])
        optimizer = stquant.AdamW(params, lr=1e-2, policy=policy)
        grads = list(gradients(params, 4))
        grads[0][0][7, 9] = value
        for later in grads[1:]:
            later[0][7, 9] = 0.0
        run(optimizer, params, grads)
        outcomes.append((params[0].detach().clone(), snapshot(optimizer, params)[1:]))
    (weight, states), (clean_weight, clean_states) = outcomes
    assert bool(weight[7, 9].isnan())
    weight[7, 9] = clean_weight[7, 9] = 0.0
    assert torch.equal(weight, clean_weight)
    assert same(states, clean_states)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_fp32_policy_treats_non_finite_gradients_as_torch_does(bad: float) -> None:
    results = []
    for make, extra in ((stquant.AdamW, {"policy": "fp32"}), (torch.optim.AdamW, {})):
        params = parameters([(8, 16)])
        grads = list(gradients(params, 3))
        grads[1][0][1, 2] = bad
        run(make(params, lr=1e-2, **extra), params, grads)
        results.append(params[0].detach())
    assert torch.equal(results[0].isnan(), results[1].isnan())


FP32_SCALES = {key: policy for key, policy in POLICIES.items() if policy != "flash8"}
"""flash8 has fp16 scales, which do not cover this range; see the test after the next."""


def states_at_both_sizes(policy: stquant.Fixed | str, power: int) -> Any:
    """Weights and decoded states after five steps with gradients as they are, and times 2**power."""
    outcomes = []
    for factor in (1.0, 2.0**power):
        params = parameters([(64, 128), (40, 160)])
        optimizer = stquant.AdamW(params, lr=1e-2, eps=0.0, weight_decay=0.0, policy=policy)
        for grads in gradients(params, 5):
            run(optimizer, params, [[torch.where(g == 0, 1e-3, g) * factor for g in grads]])
        outcomes.append((params, optimizer.export_state_dict()["state"]))
    return outcomes


@pytest.mark.parametrize("policy", FP32_SCALES.values(), ids=FP32_SCALES.keys())
@pytest.mark.parametrize("power", [-40, -27, -13, 7, 20])
def test_gradient_scale_does_not_matter(policy: stquant.Fixed | str, power: int) -> None:
    """From about 1e-12 to 1e6: states are the same codes, scales and values times the factor."""
    (weights, states), (scaled_weights, scaled_states) = states_at_both_sizes(policy, power)
    for i, (a, b) in enumerate(zip(weights, scaled_weights, strict=True)):
        assert torch.equal(states[i]["exp_avg"] * 2.0**power, scaled_states[i]["exp_avg"])
        assert torch.equal(states[i]["exp_avg_sq"] * 4.0**power, scaled_states[i]["exp_avg_sq"])
        assert torch.equal(a, b)


def test_scales_of_16_bits_lose_small_states() -> None:
    """What the recipe of FlashOptim does at gradients of 1e-12: the reason why ours are fp32."""
    (_, states), (_, scaled_states) = states_at_both_sizes("flash8", -40)
    assert bool(states[0]["exp_avg"].any())
    assert not bool(scaled_states[0]["exp_avg"].any())


@pytest.mark.parametrize("scale", [1e-12, 1e-8, 1e-3, 1e6])
def test_relative_error_is_the_same_at_every_decimal_scale(scale: float) -> None:
    def error(factor: float) -> float:
        params = [parameters([(64, 128)]) for _ in range(2)]
        packed = stquant.AdamW(params[0], lr=0.0, policy=stquant.Fixed(bits=8))
        plain = stquant.AdamW(params[1], lr=0.0, policy="fp32")
        for grads in gradients(params[0], 10):
            for optimizer, weights in ((packed, params[0]), (plain, params[1])):
                run(optimizer, weights, [[g * factor for g in grads]])
        a, b = (o.export_state_dict()["state"][0]["exp_avg"] for o in (packed, plain))
        return float((a - b).norm() / b.norm())

    assert error(scale) == pytest.approx(error(1.0), rel=0.05)


@pytest.mark.parametrize("policy", PACKED.values(), ids=PACKED.keys())
def test_updates_stay_bounded_when_gradients_jump(policy: stquant.Fixed) -> None:
    """Constant, then zero, then huge: an average that fell to zero would divide by nothing."""
    params = parameters([(64, 128)])
    optimizer = stquant.AdamW(params, lr=1e-3, weight_decay=0.0, policy=policy)
    for size, steps in ((1.0, 50), (0.0, 400), (1e6, 5), (1e-6, 50)):
        for _ in range(steps):
            before = params[0].detach().clone()
            run(optimizer, params, [[torch.full((64, 128), size)]])
            assert float((params[0].detach() - before).abs().max()) <= 1e-3 * 25
    assert bool(params[0].isfinite().all())


@pytest.mark.parametrize("policy", PACKED.values(), ids=PACKED.keys())
def test_updates_of_small_elements_stay_bounded_when_gradients_stop(policy: stquant.Fixed) -> None:
    """Far below their block's mean an average takes the lowest level: were that zero, the momentum would explode."""
    params = parameters([(64, 128)])
    optimizer = stquant.AdamW(params, lr=1e-3, weight_decay=0.0, policy=policy)
    sizes = torch.logspace(-4, 0, 128).expand(64, 128)
    for factor in [1.0] * 10 + [0.0] * 5:
        before = params[0].detach().clone()
        run(optimizer, params, [[factor * sizes]])
        # Prepay moves 3 times lr at the first step (c_1 * (1 - b1) + 1); what v loses adds to that.
        assert float((params[0].detach() - before).abs().max()) <= 1e-3 * 8


@pytest.mark.parametrize("policy", PACKED.values(), ids=PACKED.keys())
def test_the_average_of_squares_rises_and_decays_as_slowly_as_it_must(policy: stquant.Fixed) -> None:
    """A step changes it by a thousandth of its size: less than a bf16 scale or a coarse code would notice."""
    params = parameters([(64, 128)])
    optimizer = stquant.AdamW(params, lr=1e-3, policy=policy)
    expected, steps = 0.0, 300
    for size in (1.0, 0.0):
        run(optimizer, params, [[torch.full((64, 128), size)]] * steps)
        expected = expected * 0.999**steps + size * (1 - 0.999**steps)
        average = optimizer.export_state_dict()["state"][0]["exp_avg_sq"]
        assert float(average.mean()) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_no_learning_rate_and_no_gradient_is_an_identity(policy: stquant.Fixed | str, dtype: torch.dtype) -> None:
    params = parameters(dtype=dtype)
    optimizer = stquant.AdamW(params, lr=1e-2, policy=policy)
    run(optimizer, params, gradients(params, 3))
    residuals = [state["residual"].unpack() for state in optimizer.state.values() if "residual" in state]
    start = [p.detach().clone() for p in params]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    run(optimizer, params, [[torch.zeros_like(p) for p in params]])
    assert all(torch.equal(p, s) for p, s in zip(params, start, strict=True))
    after = [state["residual"].unpack() for state in optimizer.state.values() if "residual" in state]
    assert all(torch.equal(a, b) for a, b in zip(residuals, after, strict=True))


def test_huge_finite_gradients_stay_finite() -> None:
    params = parameters([(64, 128)])
    optimizer = stquant.AdamW(params, lr=1e-3)
    run(optimizer, params, [[torch.full((64, 128), 3e38)]] * 3)
    exported = optimizer.export_state_dict()["state"][0]
    assert all(bool(exported[key].isfinite().all()) for key in ("exp_avg", "exp_avg_sq"))
    assert bool(params[0].isfinite().all())
