"""Constants of a step."""

from __future__ import annotations

import pytest
import torch

from stquant.kernels.corrections import AdamConstants, prepay_factor
from stquant.kernels.ops import AdamRule


def series(beta: float, step: int) -> float:
    """The defining sum, term by term, and the part of it that is applied."""
    total, power = 0.0, 1.0
    for k in range(1, 100_000):
        power *= beta
        if power < 1e-18:
            break
        total += power / (1.0 - beta ** (step + k))
    return (1.0 - beta**step) ** 2 * total


@pytest.mark.parametrize("beta", [0.0, 1e-9, 0.1, 0.5, 0.9, 0.95, 0.99])
@pytest.mark.parametrize("step", [1, 2, 3, 10, 100, 198, 199, 10_000])
def test_prepay_factor_is_its_series(beta: float, step: int) -> None:
    assert prepay_factor(beta, step) == pytest.approx(series(beta, step), rel=2**-28)


def test_published_values() -> None:
    assert prepay_factor(0.9, 1) == pytest.approx(0.201, abs=1e-4)
    assert prepay_factor(0.9, 10) == pytest.approx(4.63, abs=0.01)
    assert prepay_factor(0.9, 1000) == pytest.approx(9.0, abs=1e-7)


def test_folded_constants_equal_the_formula() -> None:
    rule = AdamRule(3e-4, (0.9, 0.999), 1e-8, 0.1, decoupled=True, maximize=False, seed=0)
    c = AdamConstants.of(rule, step=7, single=False)
    bc1, bc2, m, v, e = 1 - 0.9**7, 1 - 0.999**7, 0.3, 0.2, 0.01
    update = 3e-4 * (m / bc1 + prepay_factor(0.9, 7) * e) / ((v / bc2) ** 0.5 + 1e-8)
    assert (c.momentum * m + c.error * e) / (v**0.5 + c.eps) == pytest.approx(update, rel=1e-14)
    assert c.keep == 1 - 3e-4 * 0.1
    assert c.decay == 0.0


def test_constants_are_rounded_once() -> None:
    rule = AdamRule(3e-4, (0.9, 0.95), 1e-8, 0.1, decoupled=False, maximize=False, seed=0)
    exact, single = AdamConstants.of(rule, 3, single=False), AdamConstants.of(rule, 3)
    assert single == tuple(torch.tensor(exact, dtype=torch.float64).float().tolist())
    assert (single.keep, exact.decay) == (1.0, 0.1)
