"""The tile of a program: a run of blocks, as `[blocks, 8, lanes]`, and its plain values.

The layout is that of `codecs.packing`: element (j, l) of a block is code j of lane l, so packing
works along the second dimension. A launch has *whole* blocks only, which lie in one stretch of
memory on 16-byte borders and are read with the widest loads there are, or it may have short ones,
which are read element by element. Element indices and addresses are 64 bits wide.
"""

from typing import NamedTuple

import triton
import triton.language as tl

FLOAT32 = tl.constexpr(0)
BFLOAT16 = tl.constexpr(1)
FLOAT16 = tl.constexpr(2)

# The head of an item's record; `records` has the rest.
FIRST_CHUNK = tl.constexpr(0)
ALL_BLOCKS = tl.constexpr(1)
ROW = tl.constexpr(2)


class Tile(NamedTuple):
    """Which blocks a program works on.

    The shape of `element` is that of the tile, all others broadcast to it. A tuple cannot hold
    compile-time constants, but shapes are constants: `live` is `[blocks, 1, 1]` in a launch of
    whole blocks.
    """

    start: tl.tensor
    """Index of the first block."""
    blocks: tl.tensor
    """How many blocks exist."""
    alive: tl.tensor
    """Whether each block exists."""
    live: tl.tensor
    """Whether each element exists."""
    size: tl.tensor
    """Elements of each block."""
    lanes: tl.tensor
    """Lanes of each block."""
    origin: tl.tensor
    """Index of an element, int64."""
    element: tl.tensor
    """Index of each element, counted from `origin`."""
    origin_lane: tl.tensor
    """A lane of the parameter, int64."""
    lane: tl.tensor
    """First lane of each block, counted from `origin_lane`."""


@triton.jit
def places(BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    """Block in the tile, place of a code in its lane, lane in the block."""
    counter = tl.arange(0, BLOCKS)[:, None, None]
    return counter, tl.arange(0, 8)[None, :, None], tl.arange(0, BLOCK // 8)[None, None, :]


@triton.jit
def locate(item, chunk, WHOLE: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    """The tile of a chunk of an item."""
    counter, place, lane = places(BLOCKS, BLOCK)
    start = (chunk - tl.load(item + FIRST_CHUNK)) * BLOCKS
    blocks = tl.minimum(tl.load(item + ALL_BLOCKS) - start, BLOCKS).to(tl.int32)
    alive = counter < blocks
    if WHOLE:
        size = tl.full([1, 1, 1], BLOCK, tl.int32)
        lanes = size // 8
        element = counter * BLOCK + place * (BLOCK // 8) + lane
        before = counter * (BLOCK // 8)
        return Tile(start, blocks, alive, alive, size, lanes, start * BLOCK, element, start * (BLOCK // 8), before)
    else:
        return _locate_ragged(item, start, blocks, alive, BLOCKS, BLOCK)


@triton.jit
def _locate_ragged(item, start, blocks, alive, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    counter, place, lane = places(BLOCKS, BLOCK)
    row = tl.load(item + ROW)
    per_row = (row + BLOCK - 1) // BLOCK
    top = start // per_row
    column = (start - top * per_row).to(tl.int32) + counter
    below = column // per_row.to(tl.int32)
    column = column - below * per_row.to(tl.int32)
    size = tl.minimum(row - column.to(tl.int64) * BLOCK, BLOCK).to(tl.int32)
    lanes = (size + 7) // 8
    row_lanes = (row + 7) // 8
    offset = place * lanes + lane
    begin = below * row + column.to(tl.int64) * BLOCK
    before = below * row_lanes + column.to(tl.int64) * (BLOCK // 8)
    live = alive & (lane < lanes) & (offset < size)
    return Tile(start, blocks, alive, live, size, lanes, top * row, begin + offset, top * row_lanes, before)


@triton.jit
def places_of(tile):
    """The `places` of a tile."""
    return places(tile.element.shape[0], 8 * tile.element.shape[2])


@triton.jit
def only_live(tile, values):
    """Zeros where no element lives; dead elements of whole blocks reach nothing."""
    return values if tile.live.shape[1] == 1 else tl.where(tile.live, values, 0.0)


@triton.jit
def _places_in_memory(address, tile, TYPE: tl.constexpr):
    """Pointers to a tile's elements and which of them live, in the shape that makes accesses widest.

    An access reaches along the last dimension. Where a block's lanes are too few for 16 bytes, the tile is one run.
    """
    start = address.to(tl.pointer_type(TYPE)) + tile.origin
    if tile.live.shape[1] != 1:
        return start + tile.element, tile.live
    else:
        start = tl.multiple_of(start, 16)
        lanes: tl.constexpr = tile.element.shape[2]
        if lanes * (TYPE.primitive_bitwidth // 8) >= 16:
            return start + tile.element, tile.live
        else:
            run = tl.arange(0, tile.element.shape[0] * 8 * lanes)
            return start + run, run < tile.blocks * (8 * lanes)


@triton.jit
def _load(address, tile, TYPE: tl.constexpr):
    pointers, live = _places_in_memory(address, tile, TYPE)
    return tl.reshape(tl.load(pointers, mask=live, other=0), tile.element.shape)


@triton.jit
def _store(address, tile, values, TYPE: tl.constexpr):
    pointers, live = _places_in_memory(address, tile, TYPE)
    tl.store(pointers, tl.reshape(values, pointers.shape), mask=live)


@triton.jit
def load(address, tile, DTYPE: tl.constexpr):
    """Values of a tensor of the parameter's shape as fp32; zeros where no element lives."""
    if DTYPE == BFLOAT16:
        return (_load(address, tile, tl.uint16).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    elif DTYPE == FLOAT16:
        return _load(address, tile, tl.float16).to(tl.float32)
    else:
        return _load(address, tile, tl.float32)


@triton.jit
def store(address, tile, values, DTYPE: tl.constexpr):
    """Store fp32 values in a tensor's dtype, rounded to nearest, ties to even."""
    if DTYPE == BFLOAT16:
        # In integers, because interpreter and older GPUs have no conversion that rounds like this.
        pattern = values.to(tl.uint32, bitcast=True)
        rounded = (pattern + 0x7FFF + ((pattern >> 16) & 1)) >> 16
        rounded = tl.where((pattern & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded)
        _store(address, tile, rounded.to(tl.uint16), tl.uint16)
    elif DTYPE == FLOAT16:
        _store(address, tile, values.to(tl.float16), tl.float16)
    else:
        _store(address, tile, values, tl.float32)
