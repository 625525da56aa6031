"""Decode, encode, recode and measure a state: everything but a step.

The record's first state is the state, its second the target of a recode; the place of the
parameter holds the plain tensor, for statistics the int64 sums.
"""

import triton
import triton.language as tl

from stquant.kernels.triton import codec
from stquant.kernels.triton.codec import LOG, MAGNITUDE, MULAW
from stquant.kernels.triton.records import (
    DATA,
    PARAM,
    SIZE,
    encode_state,
    levels,
    load_scale,
    load_state,
    state_field,
    store_state,
)
from stquant.kernels.triton.tiles import load, locate, store

ENERGY_BINS = tl.constexpr(32)


@triton.jit
def decode(
    items,
    chunks,
    DTYPE: tl.constexpr,
    FAMILY: tl.constexpr,
    BITS: tl.constexpr,
    TO_FAMILY: tl.constexpr,
    TO_BITS: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Decode the state into the plain tensor."""
    chunk = tl.program_id(0)
    item = items + tl.load(chunks + chunk).to(tl.int64) * SIZE
    tile = locate(item, chunk, WHOLE, BLOCKS, BLOCK)
    values = load_state(item, tile, 0, FAMILY, BITS)
    store(tl.load(item + PARAM), tile, values, DTYPE)


@triton.jit
def encode(
    items,
    chunks,
    DTYPE: tl.constexpr,
    FAMILY: tl.constexpr,
    BITS: tl.constexpr,
    TO_FAMILY: tl.constexpr,
    TO_BITS: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Encode the plain tensor into the state; values that are not finite count as zero."""
    chunk = tl.program_id(0)
    item = items + tl.load(chunks + chunk).to(tl.int64) * SIZE
    tile = locate(item, chunk, WHOLE, BLOCKS, BLOCK)
    values = load(tl.load(item + PARAM), tile, DTYPE)
    values = tl.where(codec.is_finite(values), values, 0.0)
    encode_state(item, tile, 0, values, FAMILY, BITS)


@triton.jit
def recode(
    items,
    chunks,
    DTYPE: tl.constexpr,
    FAMILY: tl.constexpr,
    BITS: tl.constexpr,
    TO_FAMILY: tl.constexpr,
    TO_BITS: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Encode the values of the first state into the second; from LOG to LOG the means stay."""
    chunk = tl.program_id(0)
    item = items + tl.load(chunks + chunk).to(tl.int64) * SIZE
    tile = locate(item, chunk, WHOLE, BLOCKS, BLOCK)
    values = load_state(item, tile, 0, FAMILY, BITS)
    if FAMILY == LOG and TO_FAMILY == LOG:
        store_state(item, tile, 1, values, load_scale(item, tile, 0), TO_FAMILY, TO_BITS, False)
    else:
        encode_state(item, tile, 1, values, TO_FAMILY, TO_BITS)


@triton.jit
def stats(
    items,
    chunks,
    DTYPE: tl.constexpr,
    FAMILY: tl.constexpr,
    BITS: tl.constexpr,
    TO_FAMILY: tl.constexpr,
    TO_BITS: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add the tile's part to the sums; integers, so that the order of programs cannot matter."""
    chunk = tl.program_id(0)
    item = items + tl.load(chunks + chunk).to(tl.int64) * SIZE
    tile = locate(item, chunk, WHOLE, BLOCKS, BLOCK)
    sums = tl.load(item + PARAM).to(tl.pointer_type(tl.int64))
    values = load_state(item, tile, 0, FAMILY, BITS)
    code = codec.unpack(state_field(item, 0, DATA), tile, BITS)
    lowest, shift = levels(item, 0)
    ratio = tl.abs(codec.decode(code, load_scale(item, tile, 0) * 0.0 + 1.0, lowest, shift, FAMILY, BITS))
    ratio = tl.where(tile.live, ratio, 0.0)
    square = ratio * ratio
    _add(sums, tile.live & (values == 0.0))
    _add(sums + 1, tile.live & _outermost(code, FAMILY, BITS))
    _add(sums + 2, _to_integer(ratio.to(tl.float64) * 2.0**30))
    _add(sums + 3, _to_integer(square.to(tl.float64) * 2.0**30))
    _add(sums + 4, _to_integer((square * square).to(tl.float64) * 2.0**30))
    _add_energy(sums + 5, values)


@triton.jit
def _add(target, terms):
    tl.atomic_add(target, tl.sum(tl.reshape(terms.to(tl.int64), [terms.numel]), axis=0))


@triton.jit
def _to_integer(x):
    """Round non-negative doubles to integers, ties to even."""
    # The sum's last place is 1 up to 2^51; beyond, a double of these sums is an integer.
    rounded = (x + 6755399441055744.0) - 6755399441055744.0
    return tl.where(x < 2251799813685248.0, rounded, x).to(tl.int64)


@triton.jit
def _outermost(code, FAMILY: tl.constexpr, BITS: tl.constexpr):
    """Whether a code is the top level; `reference.stats` explains DYNAMIC."""
    last: tl.constexpr = (1 << BITS) - 1
    top: tl.constexpr = 1 << BITS >> 1
    if BITS == 0:
        return code < 0
    elif FAMILY == LOG:
        return code == last
    elif FAMILY == MULAW:
        return (code & (top - 1)) == top - 1
    else:
        return (code == top) | (code == last)


@triton.jit
def _add_energy(bins, values):
    """Add squares as fixed point, each in the bin of its exponent."""
    magnitude = codec.pattern_of(values) & MAGNITUDE
    finite = codec.is_finite(values)
    place = tl.minimum(((magnitude >> 23) + 1) // 8, ENERGY_BINS - 1)
    unit = ((1023 + 128 - 8 * place).to(tl.int64) << 52).to(tl.float64, bitcast=True)
    mantissa = tl.where(finite, codec.float_of(magnitude), 0.0).to(tl.float64) * unit
    fixed = _to_integer(mantissa * mantissa * 16384.0)
    for index in range(ENERGY_BINS):
        _add(bins + index, tl.where(place == index, fixed, 0))
