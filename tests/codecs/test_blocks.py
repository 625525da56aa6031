"""The block grid."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from stquant.codecs.blocks import Grid, block_mean, from_blocks, to_blocks, why_not_packed
from tests.cases import PLAIN_SHAPES, SHAPES, name

shapes = st.lists(st.integers(0, 40), max_size=4).map(tuple)


@pytest.mark.parametrize(
    ("shape", "rows", "row"),
    [
        ((), 1, 1),
        ((5000,), 1, 5000),
        ((10, 300), 10, 300),
        ((10, 40), 10, 40),
        ((64, 3, 7, 7), 64, 147),
        ((768, 3, 16, 16), 768 * 3, 256),
        ((8, 2, 2, 2), 8, 8),
        ((0, 5), 0, 5),
    ],
    ids=name,
)
def test_rows_take_trailing_dimensions_until_a_block_is_full(shape: tuple[int, ...], rows: int, row: int) -> None:
    grid = Grid.of(shape, 128)
    assert (grid.rows, grid.row) == (rows, row)


@given(shape=shapes, block=st.sampled_from((32, 128)), limit=st.integers(1, 5000), whole=st.booleans())
def test_pieces_cover_every_element_once(shape: tuple[int, ...], block: int, limit: int, whole: bool) -> None:
    grid = Grid.of(shape, block)
    seen = torch.zeros(grid.rows, grid.row, dtype=torch.int32)
    for piece in grid.pieces(limit, whole):
        seen[piece.rows, piece.columns] += 1
        assert piece.columns.start % block == 0
        assert piece.index(torch.device("cpu"))[0, 0] == piece.rows.start * grid.row + piece.columns.start
    assert bool((seen == 1).all())


@given(shape=shapes.filter(lambda s: len(s) > 1))
def test_dimension_zero_is_never_part_of_a_row(shape: tuple[int, ...]) -> None:
    """So a cut along it never cuts a block: a shard's grid is a part of the whole grid."""
    grid = Grid.of(shape, 128)
    if shape[0] > 1:
        shard = Grid.of((1, *shape[1:]), 128)
        assert (shard.row, shard.rows * shape[0]) == (grid.row, grid.rows)


@pytest.mark.parametrize("shape", SHAPES, ids=name)
def test_packed_shapes(shape: tuple[int, ...]) -> None:
    assert why_not_packed(shape, 128) is None
    assert Grid.of(shape, 128).scale_shape[-1] == Grid.of(shape, 128).blocks_per_row


@pytest.mark.parametrize("shape", PLAIN_SHAPES, ids=name)
def test_shapes_that_stay_plain_say_why(shape: tuple[int, ...]) -> None:
    assert why_not_packed(shape, 128)


def test_flat_packs_one_dimension() -> None:
    assert why_not_packed((5000,), 128) == "1-D"
    assert why_not_packed((5000,), 128, flat=True) is None
    assert why_not_packed((4095,), 128, flat=True) == "fewer than 4096 elements"


@given(rows=st.integers(1, 4), width=st.integers(1, 400), block=st.sampled_from((32, 128)))
def test_blocks_round_trip(rows: int, width: int, block: int) -> None:
    values = torch.randn(rows, width)
    assert torch.equal(from_blocks(to_blocks(values, block), width), values)


@given(width=st.integers(1, 400))
def test_block_mean_follows_the_halving_tree(width: int) -> None:
    values = torch.rand(2, width)
    means = block_mean(to_blocks(values, 128), width)
    for row in range(2):
        for block in range(means.shape[1]):
            part = values[row, block * 128 : (block + 1) * 128]
            lanes = torch.zeros(128)
            lanes[: len(part)] = part
            half = 64
            while half:
                for i in range(half):
                    lanes[i] = lanes[i] + lanes[i + half]
                half //= 2
            assert means[row, block] == lanes[0] / torch.tensor(float(len(part)))
