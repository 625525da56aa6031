"""Which part of a parameter is measured: a function of its whole grid and of its step alone.

Rows a fixed stride apart, or one stretch of a long row, at a place that moves from step to step;
a part of a sharded parameter holds what of them falls into its box.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from stquant.codecs import rounding
from stquant.codecs.blocks import Grid, Piece
from stquant.kernels.ops import Item

SAMPLE = 1 << 10
"""Elements of a parameter that are looked at, about."""


def sampled(item: Item) -> Iterator[Piece]:
    """Yield what of the sample of the whole parameter lies in the box that is held."""
    grid = grid_of(item)
    place = _place(grid.whole, item.step)
    if grid.box is None:
        yield place
        return
    left = grid.box.start[grid.lead] * math.prod(grid.box.whole[grid.lead + 1 :]) if grid.box.start else 0
    columns = slice(max(place.columns.start - left, 0), min(place.columns.stop - left, grid.row))
    if columns.start >= columns.stop:
        return
    first = Piece(grid, slice(0, grid.rows), slice(0, 1)).index(torch.device("cpu"))[:, 0] // grid.whole.row
    stride = place.rows.step
    held = ((first - place.rows.start) % stride == 0).nonzero()[:, 0].tolist()
    straight = all(b - a == stride for a, b in itertools.pairwise(held))
    if held and straight:
        yield Piece(grid, slice(held[0], held[-1] + 1, stride), columns)
    elif held:
        yield from (Piece(grid, slice(row, row + 1), columns) for row in held)


def grid_of(item: Item) -> Grid:
    """Return the grid of an item whose states are all packed."""
    state = next(iter(item.states.values()))
    assert not isinstance(state, Tensor), "only packed states are measured"
    return state.grid


def _place(grid: Grid, step: int) -> Piece:
    """Choose the sampled rows and columns of a whole parameter at a step."""
    turn = rounding.mix64(step)
    if grid.row > SAMPLE:
        stretches = -(-grid.row // SAMPLE)
        stride, left = grid.rows, (turn >> 32) % stretches * SAMPLE
        columns = slice(left, min(left + SAMPLE, grid.row))
    else:
        stride, columns = -(-grid.elements // SAMPLE), slice(0, grid.row)
    stride = min(stride, grid.rows)
    return Piece(grid, slice(turn % stride, grid.rows, stride), columns)
