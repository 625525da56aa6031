"""The fp32 policy against torch's own optimizers, and packed ones against a plain formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import stquant
from tests.optim.helpers import gradients, parameters, run
from tests.tolerances import torch_bound

STEPS = 200

OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "no decay": {"weight_decay": 0.0},
    "strong decay": {"weight_decay": 0.5},
    "amsgrad": {"amsgrad": True},
    "maximize": {"maximize": True},
    "large eps": {"eps": 1e-2},
    "no momentum": {"betas": (0.0, 0.9)},
    "fast": {"betas": (0.5, 0.7)},
    "slow": {"betas": (0.99, 0.9999)},
    "all": {"amsgrad": True, "maximize": True, "weight_decay": 0.1, "betas": (0.8, 0.95)},
    "lr tensor": {"lr": torch.tensor(1e-3)},
}

SCHEDULES = {
    "constant": lambda o: torch.optim.lr_scheduler.ConstantLR(o, factor=1.0),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=STEPS),
    "one cycle, cycling betas": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=1e-2, total_steps=STEPS),
    "exponential": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, gamma=0.98),
}


def compare(ours: Any, theirs: Any, options: dict[str, Any], schedule: str = "constant") -> None:
    options = {"lr": 1e-2, **options}
    optimizers, params, sums = [], [], []
    for make, extra in ((theirs, {}), (ours, {"policy": "fp32"})):
        weights = parameters()
        groups = [{"params": weights[:2]}, {"params": weights[2:], "weight_decay": 0.03}]
        params.append(weights)
        optimizers.append(make(groups, **options, **extra))
    schedules = [SCHEDULES[schedule](o) for o in optimizers]
    for grads in gradients(params[0], STEPS):
        sums.append(max(float(g["lr"]) for g in optimizers[0].param_groups))
        for optimizer, weights, scheduler in zip(optimizers, params, schedules, strict=True):
            run(optimizer, weights, [grads])
            scheduler.step()
    for expected, got in zip(*params, strict=True):
        allowed = torch_bound(STEPS, float(expected.detach().abs().max()), sum(sums))
        assert float((expected - got).detach().abs().max()) <= allowed


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("name", ["AdamW", "Adam"])
def test_fp32_policy_follows_torch(name: str, options: dict[str, Any]) -> None:
    compare(getattr(stquant, name), getattr(torch.optim, name), options)


SGD_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "momentum": {"momentum": 0.9},
    "dampening": {"momentum": 0.9, "dampening": 0.3},
    "nesterov": {"momentum": 0.9, "nesterov": True},
    "decay": {"momentum": 0.8, "weight_decay": 0.1},
    "maximize": {"momentum": 0.5, "maximize": True},
}


@pytest.mark.parametrize("options", SGD_OPTIONS.values(), ids=SGD_OPTIONS.keys())
def test_sgd_follows_torch(options: dict[str, Any]) -> None:
    """With gradients of ordinary size, so that weights and updates stay of the order of one."""
    params = [parameters() for _ in range(2)]
    ours = stquant.SGD(params[0], lr=1e-2, policy="fp32", **options)
    theirs = torch.optim.SGD(params[1], lr=1e-2, **options)
    for grads in gradients(params[0], STEPS):
        small = [g / g.abs().max().clamp(min=1) for g in grads]
        run(ours, params[0], [small])
        run(theirs, params[1], [small])
    for got, expected in zip(*params, strict=True):
        # A momentum of 0.9 makes updates ten times the gradient.
        allowed = torch_bound(STEPS, float(expected.detach().abs().max()), 10 * STEPS * 1e-2)
        assert float((expected - got).detach().abs().max()) <= allowed


def plain_lion(weight: torch.Tensor, grads: list[torch.Tensor], lr: float, decay: float) -> torch.Tensor:
    """Algorithm 2 of the paper, in double."""
    weight, exp_avg = weight.detach().double(), torch.zeros(weight.shape, dtype=torch.float64)
    for grad in grads:
        direction = (0.9 * exp_avg + 0.1 * grad.double()).sign()
        exp_avg = 0.99 * exp_avg + 0.01 * grad.double()
        weight = weight - lr * (direction + decay * weight)
    return weight


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_lion_follows_its_paper(decay: float, maximize: bool) -> None:
    params = parameters()
    starts = [p.detach().clone() for p in params]
    optimizer = stquant.Lion(params, lr=1e-3, weight_decay=decay, policy="fp32", maximize=maximize)
    grads = list(gradients(params, 50))
    run(optimizer, params, grads)
    for i, (param, start) in enumerate(zip(params, starts, strict=True)):
        steps = [g[i] * (-1 if maximize else 1) for g in grads]
        torch.testing.assert_close(param.detach(), plain_lion(start, steps, 1e-3, decay).float(), rtol=0, atol=1e-5)


def test_decoupled_adam_follows_torch() -> None:
    compare(stquant.Adam, torch.optim.Adam, {"decoupled_weight_decay": True, "weight_decay": 0.1})


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_are_followed(schedule: str) -> None:
    compare(stquant.AdamW, torch.optim.AdamW, {}, schedule)


def test_float64_parameters_keep_their_precision() -> None:
    params = [parameters(dtype=torch.float64) for _ in range(2)]
    optimizers = [stquant.AdamW(params[0], lr=1e-2), torch.optim.AdamW(params[1], lr=1e-2)]
    for grads in gradients(params[0], 50):
        for optimizer, weights in zip(optimizers, params, strict=True):
            run(optimizer, weights, [grads])
    for ours, theirs in zip(*params, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert {row.reason for row in optimizers[0].ledger().rows if row.elements} == {"float64 parameter"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_parameters_are_computed_in_fp32(dtype: torch.dtype) -> None:
    """Plain rounding of a fp32 step; torch's own would keep the states in half precision."""
    halves = parameters(dtype=dtype)
    optimizer = stquant.AdamW(halves, lr=1e-3, policy="fp32", master_bits=None)
    singles = [torch.nn.Parameter(p.detach().float()) for p in halves]
    reference = stquant.AdamW(singles, lr=1e-3, policy="fp32")
    for grads in gradients(halves, 10):
        run(optimizer, halves, [grads])
        run(reference, singles, [[g.float() for g in grads]])
        for half, single in zip(halves, singles, strict=True):
            with torch.no_grad():
                single.copy_(single.to(dtype))
            assert torch.equal(half.float(), single)
