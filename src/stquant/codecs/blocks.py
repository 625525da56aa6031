"""The block grid: which elements of a parameter share a scale.

The grid follows from the shape of the whole parameter and nothing else. A parameter is a matrix
of rows: the last dimension, or as many trailing dimensions as it takes to fill a block, but never
dimension 0, so that a cut along dimension 0 never cuts a block. Each row is cut into blocks, the
last of which may be short. A rank that holds a box of the parameter has the part of the grid that
lies in it, with the whole parameter's blocks and element numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stquant.codecs.packing import CODES_PER_LANE, packed_bytes

MIN_ELEMENTS = 4096
MIN_ROW = 32


@dataclass(frozen=True, slots=True)
class Box:
    """Where what a rank holds of a parameter lies.

    Attributes:
        whole: Shape of the whole parameter.
        start: Place of the box's first element, in every dimension.
        shape: Shape of the box; may be empty.
    """

    whole: tuple[int, ...]
    start: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Strides:
    """Index in the whole parameter of the first element of a row of a box.

    `origin + row // run * jump + row % run * pitch`; a run of 0 stands for rows that follow each
    other without a gap.
    """

    origin: int
    run: int = 0
    jump: int = 0
    pitch: int = 0


@dataclass(frozen=True, slots=True)
class Grid:
    """Rows and blocks of one parameter, or of the box of it that a rank holds.

    Attributes:
        shape: Shape of what is held.
        lead: Number of leading dimensions that count rows; the others make up a row.
        block: Elements of a full block.
        box: Where that lies, None if it is the whole parameter.
    """

    shape: tuple[int, ...]
    lead: int
    block: int
    box: Box | None = None

    @classmethod
    def of(cls, shape: Sequence[int], block: int, box: Box | None = None) -> Grid:
        """Return the grid of a parameter with the global `shape`; `()` is one row of one element."""
        sizes = tuple(shape)
        lead = max(0, len(sizes) - 1)
        while lead > 1 and math.prod(sizes[lead:]) < block:
            lead -= 1
        return cls(sizes, lead, block) if box is None else cls(box.shape, lead, block, box)

    @property
    def rows(self) -> int:
        """Number of rows that are held."""
        return math.prod(self.shape[: self.lead])

    @property
    def row(self) -> int:
        """Elements of a row."""
        return math.prod(self.shape[self.lead :])

    @property
    def elements(self) -> int:
        """Elements that are held."""
        return self.rows * self.row

    @property
    def blocks_per_row(self) -> int:
        """Blocks of a row, the short one included."""
        return -(-self.row // self.block)

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """Shape in which scales are shown: the leading dimensions, then blocks."""
        return (*self.shape[: self.lead], self.blocks_per_row)

    @property
    def whole(self) -> Grid:
        """The grid of the whole parameter."""
        return self if self.box is None else Grid(self.box.whole, self.lead, self.block)

    def why_not_index(self) -> str | None:
        """Say why a row of the box is no run of elements of the whole parameter, or None if it is."""
        for dim in range(self.lead + 1, len(self.shape)) if self.box else ():
            if self.shape[dim] != self.whole.shape[dim]:
                return f"dimension {dim} is inside rows that dimensions {self.lead} to {len(self.shape) - 1} make up"
        return None

    def strides(self) -> Strides | None:
        """Return how rows lie in the whole parameter; None if one run and one jump cannot say it."""
        if self.box is None:
            return Strides(0)
        whole = self.box.whole
        size = [math.prod(whole[dim + 1 :]) for dim in range(len(whole))]
        origin = sum(start * step for start, step in zip(self.box.start, size, strict=True))
        pitch = self.whole.row
        cut = [dim for dim in range(1, self.lead) if self.shape[dim] != whole[dim]]
        if len(cut) > 1:
            return None
        if cut:
            return Strides(origin, math.prod(self.shape[cut[0] : self.lead]), size[cut[0] - 1], pitch)
        return Strides(origin) if self.row == pitch else Strides(origin, max(1, self.rows), 0, pitch)

    def pieces(self, limit: int, whole_slices: bool = False) -> Iterator[Piece]:
        """Cut the grid into pieces of about `limit` elements, on block borders.

        Args:
            limit: Elements of a piece; a row longer than that is cut.
            whole_slices: Cut between indices of dimension 0 only, whatever the size of one.
        """
        if self.elements == 0:
            return
        rows, row = self.rows, self.row
        unit = rows // self.shape[0] if whole_slices and self.lead else 1
        height = unit * max(1, limit // (unit * row))
        width = row if whole_slices or row <= limit else max(1, limit // self.block) * self.block
        for top in range(0, rows, height):
            for left in range(0, row, width):
                yield Piece(self, slice(top, min(top + height, rows)), slice(left, min(left + width, row)))


@dataclass(frozen=True, slots=True)
class Piece:
    """A rectangle of a grid: some rows, possibly a stride apart, and columns from a block border on."""

    grid: Grid
    rows: slice
    columns: slice

    @property
    def width(self) -> int:
        """Elements of a row of the piece."""
        return int(self.columns.stop - self.columns.start)

    @property
    def blocks(self) -> slice:
        """The piece's blocks within a row."""
        return slice(self.columns.start // self.grid.block, -(-self.columns.stop // self.grid.block))

    def packed(self, bits: int) -> slice:
        """The piece's bytes within a packed row."""
        start = self.columns.start * bits // CODES_PER_LANE
        return slice(start, start + packed_bytes(self.width, bits))

    def index(self, device: torch.device) -> Tensor:
        """Index of every element in the whole parameter, int64 `[rows, width]`."""
        rows = torch.arange(self.rows.start, self.rows.stop, self.rows.step or 1, dtype=torch.int64, device=device)
        columns = torch.arange(self.columns.start, self.columns.stop, dtype=torch.int64, device=device)
        box = self.grid.box
        if box is None:
            return rows[:, None] * self.grid.row + columns
        first, size = torch.zeros_like(rows), 1
        for dim in reversed(range(len(box.whole))):
            if dim < self.grid.lead:
                first += (rows % box.shape[dim] + box.start[dim]) * size
                rows = rows // box.shape[dim]
            else:
                first += box.start[dim] * size
            size *= box.whole[dim]
        return first[:, None] + columns


def why_not_packed(shape: Sequence[int], block: int, flat: bool = False) -> str | None:
    """Say why a parameter's states stay in fp32, or None if they can be packed.

    The answer depends on the global shape only: at least 2 dimensions, `MIN_ELEMENTS` elements
    and rows of `MIN_ROW`.

    Args:
        shape: Global shape of the parameter.
        block: Elements of a full block.
        flat: Whether a 1-D parameter may be packed as one row.
    """
    if len(shape) < (1 if flat else 2):
        return f"{len(shape)}-D"
    elements = math.prod(shape)
    if elements < MIN_ELEMENTS:
        return f"fewer than {MIN_ELEMENTS} elements"
    row = Grid.of(shape, block).row
    return f"rows of {row}, shorter than {MIN_ROW}" if row < MIN_ROW else None


def to_blocks(values: Tensor, block: int) -> Tensor:
    """Cut rows `[rows, width]` into blocks `[rows, blocks, block]`, short ones padded with zeros."""
    padding = -values.shape[1] % block
    padded = torch.nn.functional.pad(values, (0, padding)) if padding else values
    return padded.reshape(padded.shape[0], padded.shape[1] // block, block)


def from_blocks(blocks: Tensor, width: int) -> Tensor:
    """Return blocks as rows of `width` elements; the inverse of `to_blocks`."""
    return blocks.flatten(1)[:, :width]


def block_mean(blocks: Tensor, width: int) -> Tensor:
    """Mean of each block `[rows, blocks, block]` of rows of `width` elements.

    The sum has one order on every backend, a halving tree: lane i adds lane i + half of the
    block, then half of that, down to one. Padding counts neither in the sum nor in the number.
    """
    sums = blocks
    while sums.shape[-1] > 1:
        half = sums.shape[-1] // 2
        sums = sums[..., :half] + sums[..., half:]
    count, block = blocks.shape[1], blocks.shape[2]
    elements = torch.full((count,), float(block), dtype=blocks.dtype, device=blocks.device)
    elements[-1:] = float(width - (count - 1) * block)
    return sums[..., 0] / elements
