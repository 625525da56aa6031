"""Statistics of a stored state."""

from __future__ import annotations

import pytest
import torch

from stquant.codecs import catalog
from stquant.codecs.format import Format
from stquant.kernels.reference.stats import UNIT, state_stats
from stquant.storage.packed import PackedState
from tests.cases import PACKED, name


def encoded(format: Format, values: torch.Tensor) -> PackedState:
    return PackedState.encoded(format, values if format.signed else values.square(), 128)


@pytest.mark.parametrize("format", PACKED, ids=name)
def test_sums_equal_those_of_the_decoded_values(format: Format) -> None:
    state = encoded(format, torch.randn(70, 200))
    stats = state_stats(state)
    values = state.decode().double()
    scales = state.scales.double().abs().repeat_interleave(128, 1)[:, : values.shape[1]]
    ratio = (values / scales).abs()
    assert stats.elements == values.numel()
    assert stats.zeros == int((values == 0).sum())
    for measured, power in ((stats.ratio, 1), (stats.ratio2, 2), (stats.ratio4, 4)):
        assert measured * UNIT == pytest.approx(float((ratio**power).sum()), rel=1e-6)
    assert stats.total_energy == pytest.approx(float((values**2).sum()), rel=2e-4)


@pytest.mark.parametrize("format", PACKED, ids=name)
def test_shards_add_up_to_the_whole(format: Format) -> None:
    values = torch.randn(70, 200) * torch.exp(8 * torch.randn(70, 1))
    whole = state_stats(encoded(format, values))
    for cut in (1, 33, 69):
        parts = [state_stats(encoded(format, part)) for part in (values[:cut], values[cut:])]
        assert parts[0] + parts[1] == whole


def test_saturation_counts_the_outermost_levels() -> None:
    values = torch.full((64, 128), 0.01)
    values[:, 0] = 1.0
    values[:, 1] = -1.0
    assert state_stats(encoded(catalog.get("mulaw4"), values)).saturated == 128
    assert state_stats(encoded(catalog.get("dynamic2"), values)).saturated == 128
    assert state_stats(encoded(catalog.get("log3"), values)).saturated == 128


def test_energy_covers_the_range_of_fp32() -> None:
    for size in (1e-30, 1e-12, 1.0, 1e15, 3e37):
        state = encoded(catalog.get("mulaw8"), torch.full((32, 128), size))
        assert state_stats(state).total_energy == pytest.approx(32 * 128 * size**2, rel=2e-4)
