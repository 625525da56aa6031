"""Codes and bytes."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from stquant.codecs import packing
from tests.cases import SIZES

WIDTHS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 11, 16)


@pytest.mark.parametrize("row", SIZES)
@pytest.mark.parametrize("bits", WIDTHS)
def test_round_trip_without_waste(bits: int, row: int) -> None:
    codes = torch.randint(2**bits, (3, row))
    packed = packing.pack(codes, bits, 128)
    assert packed.dtype is torch.uint8
    assert packed.shape == (3, bits * -(-row // 8)), "at most seven codes of padding"
    assert torch.equal(packing.unpack(packed, bits, row, 128), codes.int())


@given(
    bits=st.sampled_from(WIDTHS),
    block=st.sampled_from((32, 64, 128, 256)),
    row=st.integers(0, 600),
    rows=st.integers(0, 4),
    seed=st.integers(0, 2**20),
)
def test_round_trip_anywhere(bits: int, block: int, row: int, rows: int, seed: int) -> None:
    codes = torch.randint(2**bits, (rows, row), generator=torch.Generator().manual_seed(seed))
    assert torch.equal(packing.unpack(packing.pack(codes, bits, block), bits, row, block), codes.int())


@given(
    bits=st.integers(0, 16),
    block=st.sampled_from((32, 64, 128, 256)),
    row=st.integers(0, 600),
    rows=st.integers(0, 4),
    seed=st.integers(0, 2**20),
)
def test_spread_rows_have_one_size_and_blocks_of_their_own(
    bits: int, block: int, row: int, rows: int, seed: int
) -> None:
    """Cut between blocks, as a shard is, each side gathers its own codes."""
    room = 1 if bits <= 8 else 2
    codes = torch.randint(2**bits, (rows, row), generator=torch.Generator().manual_seed(seed))
    packed = packing.pack(codes, bits, block)
    shown = packing.spread(packed, bits, row, block, room)
    assert (shown.shape, shown.dtype) == ((rows, room * row), torch.uint8)
    assert torch.equal(packing.gather(shown, bits, row, block, room), packed)
    cut = row // block // 2 * block
    for part, columns in ((shown[:, : room * cut], slice(0, cut)), (shown[:, room * cut :], slice(cut, row))):
        expected = packing.pack(codes[:, columns], bits, block)
        assert torch.equal(packing.gather(part, bits, part.shape[1] // room, block, room), expected)
    full = row // block * block
    unused = shown[:, : room * full].view(rows, full // block, room * block)[..., block * bits // 8 :]
    assert not unused.any()


def test_layout_is_the_documented_one() -> None:
    """Lane l holds elements l, l+16, ... as a little-endian integer, stored plane by plane."""
    bits, codes = 3, torch.randint(8, (1, 128))
    packed = packing.pack(codes, bits, 128)[0]
    for lane in range(16):
        word = sum(int(codes[0, lane + 16 * j]) << (bits * j) for j in range(8))
        assert [int(packed[plane * 16 + lane]) for plane in range(bits)] == [word >> 8 * p & 255 for p in range(bits)]


def test_padding_is_zero_bits() -> None:
    packed = packing.pack(torch.ones(1, 9, dtype=torch.int32), 8, 128)
    assert packed.sum() == 9
    assert packed.shape == (1, 16)
