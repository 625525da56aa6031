"""16-bit parameters: residuals and stochastic rounding."""

from __future__ import annotations

import pytest
import torch

import stquant
from stquant.codecs import residual
from tests.optim.helpers import gradients, parameters, run

STEPS = 1000


@pytest.mark.parametrize("master_bits", [0, 1, 4, 8, 16, "auto"])
def test_small_updates_are_not_lost(master_bits: int | str) -> None:
    """1,000 equal steps of 1e-4 from 1.0: torch's bf16 AdamW does not move at all."""
    param = torch.nn.Parameter(torch.ones(64, 128, dtype=torch.bfloat16))
    optimizer = stquant.AdamW([param], lr=1e-4, weight_decay=0.0, eps=0.0, policy="fp32", master_bits=master_bits)
    for _ in range(STEPS):
        param.grad = torch.ones_like(param)
        optimizer.step()
    state = optimizer.state[param]
    weight = param.detach().float()
    if "residual" in state:
        weight = residual.join(param.detach(), state["residual"].unpack())
    # Rounding at 0 bits is a random walk of 1,000 steps of at most 2**-8, averaged over 8,192 weights.
    assert float(weight.mean()) == pytest.approx(0.9, abs=4 * 2.0**-9 * (1000 / 8192) ** 0.5)


def test_plain_rounding_stalls_as_in_torch() -> None:
    param = torch.nn.Parameter(torch.ones(64, 128, dtype=torch.bfloat16))
    optimizer = stquant.AdamW([param], lr=1e-4, weight_decay=0.0, policy="fp32", master_bits=None)
    for _ in range(10):
        param.grad = torch.ones_like(param)
        optimizer.step()
    assert bool((param == 1.0).all())


def test_float16_steps_are_finite_and_unbiased() -> None:
    param = torch.nn.Parameter(torch.ones(64, 128, dtype=torch.float16))
    optimizer = stquant.AdamW([param], lr=1e-5, weight_decay=0.0)
    for _ in range(200):
        param.grad = torch.full_like(param, 1e-6)
        optimizer.step()
    assert bool(param.isfinite().all())
    assert float(param.detach().float().mean()) == pytest.approx(1 - 200 * 1e-5 * 1e-6 / (1e-6 + 1e-8), abs=1e-4)


def test_sixteen_residual_bits_equal_fp32_parameters() -> None:
    halves = parameters(dtype=torch.bfloat16)
    singles = [torch.nn.Parameter(p.detach().float()) for p in halves]
    ours = stquant.AdamW(halves, lr=1e-3, master_bits=16)
    plain = stquant.AdamW(singles, lr=1e-3)
    for grads in gradients(halves, 20):
        run(ours, halves, [grads])
        run(plain, singles, [[g.float() for g in grads]])
    for half, single in zip(halves, singles, strict=True):
        exact = residual.join(half.detach(), ours.state[half]["residual"].unpack())
        assert torch.equal(exact, single.detach())


@pytest.mark.parametrize(("bits", "bytes_per_parameter"), [(8, 1.0), (4, 0.5), (16, 2.0), (1, 0.125)])
def test_a_residual_costs_its_bits(bits: int, bytes_per_parameter: float) -> None:
    param = torch.nn.Parameter(torch.zeros(64, 128, dtype=torch.bfloat16))
    optimizer = stquant.AdamW([param], master_bits=bits)
    optimizer.init_state()
    assert optimizer.ledger().residual_bytes == bytes_per_parameter * param.numel()


@pytest.mark.parametrize("master_bits", [9, 15, 17, -1, True, "8", 1.5])
def test_impossible_residuals_raise(master_bits: object) -> None:
    with pytest.raises(ValueError, match="master_bits"):
        stquant.AdamW(parameters(), master_bits=master_bits)  # type: ignore[arg-type]


def test_float16_takes_no_residual() -> None:
    with pytest.raises(ValueError, match="float16, which takes no residual"):
        stquant.AdamW(parameters(dtype=torch.float16), master_bits=8)


def test_prepay_needs_weights_that_hold_small_changes() -> None:
    with pytest.raises(ValueError, match="prepays small changes"):
        stquant.AdamW(parameters(dtype=torch.bfloat16), master_bits=None, policy=stquant.Fixed(bits=2))
    stquant.AdamW(parameters(dtype=torch.bfloat16), master_bits=None, policy=stquant.Fixed(bits=4))
