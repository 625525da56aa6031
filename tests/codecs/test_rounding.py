"""The random numbers, and stochastic rounding to fp16."""

from __future__ import annotations

import itertools

import pytest
import torch

from stquant.codecs import rounding
from stquant.codecs.rounding import Stream
from tests.tolerances import STANDARD_ERRORS

INDEX = torch.arange(1 << 16)


def bits_of(values: torch.Tensor, width: int) -> torch.Tensor:
    return (values[..., None] >> torch.arange(width)) & 1


def test_splitmix_gives_the_published_sequence() -> None:
    """First outputs of SplitMix64 from state 0."""
    state, outputs = 0, []
    for _ in range(3):
        outputs.append(rounding.mix64(state))
        state += 0x9E3779B97F4A7C15
    assert outputs == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_numbers_never_change() -> None:
    """A checkpoint resumes bit for bit only if these stay as they are."""
    key = rounding.key(seed=1, noise_id=2, stream=Stream.EXP_AVG_SQ, step=3)
    drawn = rounding.random_bits(key, torch.tensor([0, 1, 2, (1 << 40) + 7]))
    assert (key, drawn.tolist()) == GOLDEN


def test_every_index_bit_flips_every_output_bit_half_of_the_time() -> None:
    key = rounding.key(0, 0, Stream.WEIGHT, 1)
    index = torch.randint(1 << 40, (1 << 14,))
    drawn = rounding.random_bits(key, index)
    for bit in range(40):
        flipped = bits_of(drawn ^ rounding.random_bits(key, index ^ (1 << bit)), 32).double().mean(0)
        assert (flipped - 0.5).abs().max() < 0.03, f"index bit {bit}"


def test_every_key_ingredient_changes_everything() -> None:
    base = rounding.key(5, 6, Stream.EXP_AVG, 7)
    others = [
        rounding.key(4, 6, Stream.EXP_AVG, 7),
        rounding.key(5, 7, Stream.EXP_AVG, 7),
        rounding.key(5, 6, Stream.EXP_AVG_SQ, 7),
        rounding.key(5, 6, Stream.EXP_AVG, 8),
    ]
    drawn = [rounding.random_bits(key, INDEX) for key in (base, *others)]
    for a, b in itertools.combinations(drawn, 2):
        flipped = bits_of(a ^ b, 32).double().mean(0)
        assert (flipped - 0.5).abs().max() < STANDARD_ERRORS * 0.5 / len(INDEX) ** 0.5 * 1.5


def test_streams_steps_and_neighbours_are_uncorrelated() -> None:
    def uniform(noise_id: int, stream: Stream, step: int) -> torch.Tensor:
        return rounding.random_bits(rounding.key(0, noise_id, stream, step), INDEX).double() / 2.0**32 - 0.5

    draws = [uniform(i, s, t) for i in (0, 1) for s in (Stream.EXP_AVG_SQ, Stream.WEIGHT) for t in (1, 2, 3)]
    draws.append(draws[0].roll(1))
    stacked = torch.stack(draws)
    correlation = torch.corrcoef(stacked) - torch.eye(len(draws), dtype=torch.float64)
    assert correlation.abs().max() < STANDARD_ERRORS / len(INDEX) ** 0.5
    assert stacked.mean(1).abs().max() < STANDARD_ERRORS * (1 / 12 / len(INDEX)) ** 0.5


def test_all_values_of_the_top_bits_are_equally_likely() -> None:
    drawn = rounding.random_bits(rounding.key(0, 3, Stream.WEIGHT, 9), torch.arange(1 << 20)) >> 22
    counts = torch.bincount(drawn, minlength=1024).double()
    chi_square = float(((counts - 1024) ** 2 / 1024).sum())
    assert abs(chi_square - 1023) < STANDARD_ERRORS * (2 * 1023) ** 0.5


@pytest.mark.parametrize("value", [1.0 + 2**-12, 3.1415927, -1e-6, 1e-7, 65000.0, -(2.0**-14) * 1.0001])
def test_float16_rounding_is_unbiased(value: float) -> None:
    draws = 1 << 18
    random = rounding.random_bits(rounding.key(0, 0, Stream.WEIGHT, 1), torch.arange(draws))
    rounded = rounding.round_to_float16(torch.full((draws,), value), random).double()
    spread = float(rounded.std())
    exact = float(torch.tensor(value).double())
    assert abs(float(rounded.mean()) - exact) <= STANDARD_ERRORS * spread / draws**0.5 + abs(exact) * 2.0**-26
    assert len(rounded.unique()) <= 2


def test_float16_rounding_keeps_what_fits_and_never_overflows() -> None:
    patterns = torch.arange(1 << 16).to(torch.int32)
    half = torch.where(patterns >= 1 << 15, patterns - (1 << 16), patterns).to(torch.int16).view(torch.float16)
    for random in (0, (1 << 32) - 1):
        noise = torch.full(half.shape, random)
        kept = rounding.round_to_float16(half.float(), noise)
        assert torch.equal(kept.view(torch.int16)[~half.isnan()], half.view(torch.int16)[~half.isnan()])
        assert bool(kept[half.isnan()].isnan().all())
    large = torch.tensor([65504.0, 65519.0, 1e30, -1e30])
    top = rounding.round_to_float16(large, torch.zeros(4, dtype=torch.int64))
    assert top.tolist() == [65504.0, 65504.0, 65504.0, -65504.0]


GOLDEN = (0xFB7EE6B8E2F2DCD2, [0x24DDCB95, 0x24F6497E, 0xBDDD6061, 0x2DFCB83F])
