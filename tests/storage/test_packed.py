"""The buffers of a state."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from stquant.codecs import catalog
from stquant.codecs.blocks import Grid
from stquant.codecs.format import Format
from stquant.storage.master import PackedResidual
from stquant.storage.packed import PackedState
from tests.cases import PACKED, PLAIN_SHAPES, SHAPES, name


@pytest.mark.parametrize("shape", [*SHAPES, *PLAIN_SHAPES], ids=name)
@pytest.mark.parametrize("format", [catalog.get(n) for n in ("dynamic3", "mulaw5", "log0", "log1", "log8")], ids=name)
def test_plain_codes_round_trip(format: Format, shape: tuple[int, ...]) -> None:
    state = PackedState.encoded(format, torch.rand(shape), 128)
    codes = state.unpack()
    assert codes.dtype is torch.uint8
    assert codes.shape == shape
    again = PackedState.pack(format, state.grid, state.octaves, codes, state.scales.view(state.grid.scale_shape))
    assert torch.equal(again.codes, state.codes)
    assert torch.equal(again.scales, state.scales)


@pytest.mark.parametrize("format", PACKED, ids=name)
def test_zeros_decode_to_zero(format: Format) -> None:
    assert not bool(PackedState.zeros(format, Grid.of((3, 129), 128)).decode().any())


@pytest.mark.parametrize("format", PACKED, ids=name)
def test_bytes_are_codes_and_scales_and_nothing_else(format: Format) -> None:
    state = PackedState.zeros(format, Grid.of((64, 256), 128))
    held = sum(t.untyped_storage().nbytes() for t in state.tensors())
    assert held == format.bits_per_element * 64 * 256 / 8


@pytest.mark.parametrize("bits", [1, 3, 8, 16])
@pytest.mark.parametrize("shape", [(64, 129), (7,), (), (0, 5), (3, 3, 3)], ids=name)
def test_residual_round_trip(bits: int, shape: tuple[int, ...]) -> None:
    values = (torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), shape) << (16 - bits)).to(torch.int16)
    state = PackedResidual.pack(bits, Grid.of(shape, 128), values)
    assert torch.equal(state.unpack(), values)


def test_states_copy_pickle_and_move() -> None:
    state = PackedState.encoded(catalog.get("mulaw4"), torch.randn(4, 130), 128)
    for other in (copy.deepcopy(state), pickle.loads(pickle.dumps(state)), state.to("cpu")):
        assert other.format == state.format
        assert torch.equal(other.decode(), state.decode())
