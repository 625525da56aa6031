"""Codes and values: every code, its neighbours, and ties."""

from __future__ import annotations

import pytest
import torch

from stquant.codecs import curves
from stquant.codecs.format import Family, Format
from tests.cases import MULAW, NON_NEGATIVE, PACKED, SIGNED, STOCHASTIC, name
from tests.tolerances import STANDARD_ERRORS

SCALES = (1.0, 3.0, 0.1, 1e-20, 7.3e25, 2.0**-99, 1.7e30)


def canonical(format: Format) -> torch.Tensor:
    levels = curves.levels(format)
    return torch.arange(len(levels), dtype=torch.int32)[~levels.isnan()]


def nearest(format: Format, values: torch.Tensor, scale: float) -> torch.Tensor:
    return curves.encode(format, values, torch.tensor([scale]), curves.default_octaves(format))


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("format", PACKED, ids=name)
def test_every_code_encodes_back_to_itself(format: Format, scale: float) -> None:
    codes = canonical(format)
    values = curves.decode(format, codes, torch.tensor([scale]), curves.default_octaves(format))
    assert torch.equal(nearest(format, values, scale), codes)


@pytest.mark.parametrize("random", [0, 1, 0xFFFFFFFF])
@pytest.mark.parametrize("format", STOCHASTIC, ids=name)
def test_a_stored_value_is_never_moved_by_stochastic_rounding(format: Format, random: int) -> None:
    codes = canonical(format)
    octaves = curves.default_octaves(format)
    scale = torch.tensor([2.0**-7])
    values = curves.decode(format, codes, scale, octaves)
    noise = torch.full(codes.shape, random, dtype=torch.int64)
    assert torch.equal(curves.encode(format, values, scale, octaves, noise), codes)


@pytest.mark.parametrize("format", PACKED, ids=name)
def test_levels_are_distinct_and_reach_the_scale(format: Format) -> None:
    levels = curves.levels(format)[canonical(format).long()]
    assert len(levels.unique()) == len(levels)
    if format.signed and format.bits:
        assert levels.max() == 1.0
        assert levels[0] == 0.0
    if not format.signed:
        assert levels.min() > 0.0, "a level of zero would divide by zero"


def exact_scale(format: Format) -> float:
    """A scale at which values near midpoints are free of rounding."""
    return 4.5 - 2.0 ** (4 - format.bits) if format.family is Family.MULAW else 1.0


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("format", [f for f in PACKED if f.bits], ids=name)
def test_midpoints_round_up_and_neighbours_to_their_side(format: Format, sign: int) -> None:
    if sign < 0 and not format.signed:
        pytest.skip("no negative values")
    scale = exact_scale(format)
    values = curves.decode(format, canonical(format), torch.tensor([scale]), curves.default_octaves(format))
    ladder = (values[values * sign >= 0] * sign).sort().values
    codes = nearest(format, ladder * sign, scale)
    for low, high, low_code, high_code in zip(ladder, ladder[1:], codes, codes[1:], strict=False):
        if format.family is Family.LOG:
            pattern = (low.view(torch.int32).long() + high.view(torch.int32).long()) // 2
            middle = pattern.int().view(torch.float32)
        elif format.family is Family.DYNAMIC:
            literal = [level for level in curves.DYNAMIC_LEVELS[format.bits] if level >= 0]
            below_middle = min(literal, key=lambda level: abs(level - float(low)))
            above_middle = min(literal, key=lambda level: abs(level - float(high)))
            middle = torch.tensor((below_middle + above_middle) / 2)
        else:
            middle = (low + high) / 2
        below = torch.nextafter(middle, torch.tensor(0.0))
        assert nearest(format, middle[None] * sign, scale) == high_code
        if format.family is Family.MULAW:
            below = middle - 2.0**-20  # the bias costs the last bits of small values
        assert nearest(format, below[None] * sign, scale) == low_code


@pytest.mark.parametrize("format", PACKED, ids=name)
def test_only_canonical_codes_are_produced(format: Format) -> None:
    values = torch.randn(4096) * torch.exp(4 * torch.randn(4096))
    edges = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 1e-38, -1e-38, 3e38, -3e38, 2.0**-100, -(2.0**-100)])
    values = torch.cat((values, edges))
    if not format.signed:
        values = values.abs().clamp(max=2.0**120)
    allowed = set(canonical(format).tolist())
    for scale in (*SCALES, 0.0, 1e-40):
        random = torch.randint(1 << 32, values.shape) if format.stochastic else None
        scaled = values if format.signed else values * min(scale, 1.0)
        codes = curves.encode(format, scaled, torch.tensor([scale]), curves.default_octaves(format), random)
        assert set(codes.tolist()) <= allowed


@pytest.mark.parametrize("format", PACKED, ids=name)
def test_scales_that_count_as_zero(format: Format) -> None:
    values = torch.rand(100) * 1e-35
    for scale in (0.0, 1e-38, 2.0**-101):
        codes = nearest(format, values, scale)
        assert not codes.any()
        decoded = curves.decode(format, codes, torch.tensor([scale]), curves.default_octaves(format))
        assert torch.equal(decoded, torch.full((100,), 0.0 if format.signed else scale))


@pytest.mark.parametrize("format", SIGNED, ids=name)
def test_block_scale_puts_the_largest_element_on_a_level(format: Format) -> None:
    cut = torch.randn(1000, 128)
    scale = curves.block_scale(format, cut)
    assert torch.equal(scale.abs(), cut.abs().amax(-1))
    if format.bits:
        codes = curves.encode(format, cut, scale[:, None], curves.default_octaves(format))
        decoded = curves.decode(format, codes, scale[:, None], curves.default_octaves(format))
        largest = cut.abs().argmax(-1, keepdim=True)
        torch.testing.assert_close(decoded.gather(1, largest), cut.gather(1, largest), rtol=2**-22, atol=0)


@pytest.mark.parametrize("format", STOCHASTIC, ids=name)
def test_stochastic_rounding_is_unbiased_in_the_code(format: Format) -> None:
    draws = 1_000_000
    octaves = curves.default_octaves(format)
    for share in (0.1, 0.5, 0.77):
        pattern = 0x3F800000 + (octaves.lo << 23) + round(share * 2 ** (23 + octaves.log2_step))
        value = torch.tensor(pattern, dtype=torch.int32).view(torch.float32)
        codes = curves.encode(
            format, value.expand(draws), torch.ones(1), octaves, torch.randint(1 << 32, (draws,))
        ).double()
        error = (share * (1 - share) / draws) ** 0.5
        assert abs(codes.mean() - share) < STANDARD_ERRORS * error
        assert set(codes.unique().tolist()) <= {0.0, 1.0}


@pytest.mark.parametrize("format", [f for f in NON_NEGATIVE if f.bits], ids=name)
def test_saturation_stops_at_the_outermost_levels(format: Format) -> None:
    codes = nearest(format, torch.tensor([0.0, 1e-30, 100.0, 2.0**120]), 1.0)
    assert codes.tolist() == [0, 0, 2**format.bits - 1, 2**format.bits - 1]


@pytest.mark.parametrize("format", MULAW, ids=name)
def test_mulaw_levels_are_the_ones_documented(format: Format) -> None:
    steps = 2 ** (format.bits - 2)
    biased = [(1 + i % steps / steps) * 2 ** (i // steps) for i in range(steps // 2, steps // 2 + 2 * steps)]
    expected = torch.tensor([(u - 1.5) / (biased[-1] - 1.5) for u in biased])
    torch.testing.assert_close(curves.levels(format)[: 2 * steps], expected, rtol=2**-22, atol=0)
