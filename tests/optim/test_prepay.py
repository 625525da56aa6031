"""Prepay: coarse momentum changes when a weight moves, not where it ends."""

from __future__ import annotations

import pytest
import torch

import stquant
from stquant.codecs.format import Format
from stquant.kernels.corrections import prepay_factor
from tests.cases import SIGNED, name
from tests.optim.helpers import gradients, parameters, run

PREPAID = [format for format in SIGNED if format.prepay]
LR, EPS, BETAS = 1e5, 1e7, (0.9, 0.999)
"""An eps far above sqrt(v) keeps the denominator constant; LR / EPS is an ordinary step."""

SETTLED = 1000
"""Steps after which errors are prepaid whole."""


@pytest.mark.parametrize("format", PREPAID, ids=name)
def test_after_the_gradient_stops_the_sum_of_updates_is_that_of_fp32(format: Format) -> None:
    """With a constant denominator rounding must not show in the end."""
    ends = []
    for policy in (stquant.Fixed(exp_avg=format.name), "fp32"):
        params = parameters([(64, 128), (40, 160)])
        start = [p.detach().clone() for p in params]
        optimizer = stquant.AdamW(params, lr=LR, betas=BETAS, eps=EPS, weight_decay=0.0, policy=policy)
        optimizer.init_state()
        for p in params:
            optimizer.state[p]["step"] += SETTLED
        run(optimizer, params, gradients(params, 20))
        run(optimizer, params, [[torch.zeros_like(p) for p in params]] * 250)
        ends.append([p.detach() - s for p, s in zip(params, start, strict=True)])
    for packed, plain in zip(*ends, strict=True):
        # The weights are fp32: each of 270 steps rounds one by half an ulp of about 2.
        torch.testing.assert_close(packed, plain, rtol=1e-3, atol=270 * 2.0**-23)


@pytest.mark.parametrize("format", PREPAID, ids=name)
@pytest.mark.parametrize("steps", [1, 2, 17, 300])
def test_one_encoding_keeps_the_invariant(format: Format, steps: int) -> None:
    """w - lr * c_t * m / d is the same before and after the momentum is rounded."""
    grads = list(gradients(parameters([(64, 128)]), steps))
    params = parameters([(64, 128)])
    policy = stquant.Fixed(exp_avg=format.name)
    optimizer = stquant.AdamW(params, lr=LR, betas=BETAS, eps=EPS, weight_decay=0.0, policy=policy)
    run(optimizer, params, grads[:-1])
    weights, momenta = [params[0].detach().double()], [decoded(optimizer, params[0])]
    run(optimizer, params, grads[-1:])
    weights.append(params[0].detach().double())
    momenta.append(decoded(optimizer, params[0]))
    g = grads[-1][0].double()
    v = optimizer.state[params[0]]["exp_avg_sq"].double()
    d = (v / (1 - BETAS[1] ** steps)).sqrt() + EPS
    exact = BETAS[0] * momenta[0] + (1 - BETAS[0]) * g
    unrounded = weights[0] - LR * exact / (1 - BETAS[0] ** steps) / d
    c = prepay_factor(BETAS[0], steps)
    # Each side carries the fp32 rounding of the weights.
    torch.testing.assert_close(unrounded - LR * c * exact / d, weights[1] - LR * c * momenta[1] / d, rtol=0, atol=1e-6)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("format", PREPAID, ids=name)
def test_sgd_ends_where_fp32_ends(format: Format, nesterov: bool) -> None:
    """Without a denominator the invariant is exact: only the rounding of the weights is left."""
    ends = []
    for policy in (stquant.Fixed(momentum_buffer=format.name), "fp32"):
        params = parameters([(64, 128), (40, 160)])
        optimizer = stquant.SGD(params, lr=1e-3, momentum=0.9, nesterov=nesterov, policy=policy)
        run(optimizer, params, gradients(params, 20))
        run(optimizer, params, [[torch.zeros_like(p) for p in params]] * 250)
        ends.append([p.detach() for p in params])
    for packed, plain in zip(*ends, strict=True):
        # 270 steps, each rounding a weight by half an ulp of at most 4.
        torch.testing.assert_close(packed, plain, rtol=0, atol=270 * 2.0**-22)


def test_the_first_steps_prepay_less_than_half() -> None:
    """Applied whole at once they would move the weights by more than any later step does."""
    params, coarse = parameters([(64, 128)]), stquant.Fixed(exp_avg="dynamic2")
    start = params[0].detach().double()
    optimizer = stquant.AdamW(params, lr=LR, betas=BETAS, eps=EPS, weight_decay=0.0, policy=coarse)
    grads = next(gradients(params, 1))
    run(optimizer, params, [grads])
    exact = (1 - BETAS[0]) * grads[0].double()
    plain = LR / EPS * exact / (1 - BETAS[0])
    prepaid = (start - params[0].detach() - plain).abs()
    dropped = (exact - decoded(optimizer, params[0])).abs()
    ahead = sum(BETAS[0] ** k / (1 - BETAS[0] ** (1 + k)) for k in range(1, 500))
    assert bool((prepaid > 0).any())
    # Rounding of the weights and of v aside, which an eps this large nearly hides.
    assert bool((prepaid <= 0.5 * LR / EPS * ahead * dropped + 1e-5 * plain.abs() + 1e-6).all())


def decoded(optimizer: stquant.AdamW, param: torch.Tensor) -> torch.Tensor:
    state = optimizer.state.get(param)
    return state["exp_avg"].decode().double() if state else torch.zeros(param.shape, dtype=torch.float64)


@pytest.mark.parametrize("policy", [stquant.Fixed(exp_avg="dynamic2", exp_avg_sq="log1"), stquant.Fixed(bits=4)])
def test_an_untouched_coordinate_never_moves(policy: stquant.Fixed) -> None:
    table = torch.nn.Embedding(64, 128)
    start = table.weight.detach().clone()
    optimizer = stquant.AdamW(table.parameters(), lr=1e-2, weight_decay=0.0, policy=policy)
    touched = torch.tensor([1, 5, 40])
    for step in range(500):
        optimizer.zero_grad()
        out = table(touched)
        (out[:, ::2] * torch.sin(torch.arange(64.0) + step)).sum().backward()
        optimizer.step()
    moved = table.weight.detach() != start
    assert not bool(moved[:, 1::2].any()), "elements that share a block with moving ones"
    assert not bool(moved[2:5].any()), "rows that were never looked up"
    assert bool(moved[touched][:, ::2].any())
