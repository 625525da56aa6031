"""Reading and writing a piece of a tensor, whatever its strides.

A tensor whose strides allow it is seen as a matrix of rows; any other is cut between indices of
dimension 0, and a temporary copy holds one cut at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from stquant.codecs.blocks import Grid, Piece

PIECE = 1 << 16
"""Elements worked on at a time: 256 KiB for each fp32 temporary."""


def pieces(grid: Grid, tensors: Sequence[Tensor]) -> Iterator[Piece]:
    """Cut a grid so that every one of `tensors` can be read and written piece by piece."""
    whole_slices = any(_as_rows(tensor, grid) is None for tensor in tensors)
    return grid.pieces(PIECE, whole_slices)


def read(tensor: Tensor, piece: Piece) -> Tensor:
    """Return the values of a piece, `[rows, width]`; possibly a view."""
    rows = _as_rows(tensor, piece.grid)
    if rows is not None:
        return rows[piece.rows, piece.columns]
    if piece.rows.step is not None:
        return _gather(tensor, piece)[:, piece.columns]
    return _slice(tensor, piece).reshape(-1, piece.width)


def write_(tensor: Tensor, piece: Piece, values: Tensor) -> None:
    """Store the values of a piece `[rows, width]`, converted to the tensor's dtype."""
    rows = _as_rows(tensor, piece.grid)
    if rows is not None:
        rows[piece.rows, piece.columns] = values
    else:
        target = _slice(tensor, piece)
        target.copy_(values.view(target.shape))


def _as_rows(tensor: Tensor, grid: Grid) -> Tensor | None:
    """View `tensor` as a matrix of rows; None if its strides do not allow it."""
    try:
        return tensor.view(grid.rows, grid.row)
    except RuntimeError:
        return None


def _slice(tensor: Tensor, piece: Piece) -> Tensor:
    per_index = piece.grid.rows // piece.grid.shape[0]
    return tensor[piece.rows.start // per_index : piece.rows.stop // per_index]


def _gather(tensor: Tensor, piece: Piece) -> Tensor:
    """Copy rows that lie a stride apart."""
    rows = torch.arange(piece.rows.start, piece.rows.stop, piece.rows.step, device=tensor.device)
    return tensor[torch.unravel_index(rows, piece.grid.shape[: piece.grid.lead])].reshape(-1, piece.grid.row)


def root(values: Tensor) -> Tensor:
    """Correctly rounded square root."""
    return values.double().sqrt().to(values.dtype)
