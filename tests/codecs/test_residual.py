"""A fp32 weight as bf16 plus residual."""

from __future__ import annotations

import pytest
import torch

from stquant.codecs import residual

BITS = (0, 1, 4, 7, 8, 15, 16)
UPPER_HALVES = (0x0000, 0x0001, 0x007F, 0x0080, 0x3F80, 0x3FFF, 0x4049, 0x7F00, 0x7F7E, 0x8000, 0x8001, 0xBF80, 0xFF00)
"""Denormals, the border to normal numbers, ordinary ones, the largest exponents; both signs."""


def as_float(pattern: torch.Tensor) -> torch.Tensor:
    return torch.where(pattern >= 1 << 31, pattern - (1 << 32), pattern).to(torch.int32).view(torch.float32)


def as_pattern(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int32).long() & 0xFFFFFFFF


def weights(upper: int) -> torch.Tensor:
    """All low halves under one upper half."""
    return as_float((upper << 16) + torch.arange(1 << 16))


def noise(n: int, kind: str) -> torch.Tensor | None:
    if kind == "nearest":
        return None
    return {"zeros": torch.zeros(n, dtype=torch.int64), "ones": torch.full((n,), 0xFFFFFFFF)}.get(
        kind, torch.randint(1 << 32, (n,))
    )


KINDS = ("nearest", "zeros", "ones", "random")


@pytest.mark.parametrize("upper", UPPER_HALVES, ids=hex)
def test_sixteen_bits_are_exact(upper: int) -> None:
    value = weights(upper)
    half, rest = residual.split(value, 16)
    assert torch.equal(as_pattern(residual.join(half, rest)), as_pattern(value))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("upper", UPPER_HALVES, ids=hex)
def test_split_is_a_fixed_point_and_its_error_is_bounded(upper: int, bits: int, kind: str) -> None:
    value = weights(upper)
    half, rest = residual.split(value, bits, noise(len(value), kind))
    joined = residual.join(half, rest)
    unit = 1 << (16 - bits)
    error = (as_pattern(joined) - as_pattern(value)).abs()
    assert int(error.max()) <= (unit // 2 if kind == "nearest" else max(0, unit - 1))
    assert not bool((rest.int() % unit).any())
    codes = residual.to_codes(rest, bits)
    assert int(codes.max()) < 2**bits
    assert torch.equal(residual.from_codes(codes, bits), rest)
    for again in KINDS:
        half2, rest2 = residual.split(joined, bits, noise(len(value), again))
        assert torch.equal(half2.view(torch.int16), half.view(torch.int16))
        assert torch.equal(rest2, rest)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("kind", KINDS)
def test_special_values(bits: int, kind: str) -> None:
    inf, nan = float("inf"), float("nan")
    value = torch.tensor([inf, -inf, nan, -nan, 0.0, -0.0, 1e-45, -1e-45])
    half, rest = residual.split(value, bits, noise(len(value), kind))
    joined = residual.join(half, rest)
    assert joined[:2].tolist() == [inf, -inf]
    assert bool(joined[2:4].isnan().all())
    assert not bool(rest[:6].any())
    assert (half[2:4].view(torch.int16) & 0x7FFF).tolist() == [0x7FC0, 0x7FC0]
    assert torch.equal(as_pattern(joined[4:6]), as_pattern(value[4:6]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", BITS)
def test_finite_weights_never_become_infinite(bits: int, kind: str) -> None:
    value = torch.cat((weights(0x7F7F), weights(0xFF7F)))
    half, rest = residual.split(value, bits, noise(len(value), kind))
    assert bool(half.isfinite().all())
    joined = residual.join(half, rest)
    assert bool(joined.isfinite().all())
    inner = (as_pattern(value) & 0x7FFFFFFF) <= 0x7F7F0000
    assert torch.equal(joined[inner], residual.join(*residual.split(value[inner], 16)))


@pytest.mark.parametrize("bits", [0, 4, 8])
def test_stochastic_rounding_is_unbiased(bits: int) -> None:
    draws = 1_000_000
    value = torch.full((draws,), 1.2345678)
    joined = residual.join(*residual.split(value, bits, torch.randint(1 << 32, (draws,)))).double()
    spread = float(joined.std())
    assert abs(float(joined.mean() - value[0].double())) < 4 * spread / draws**0.5
