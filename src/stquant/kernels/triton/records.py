"""What a program reads about its item: numbers in the item's record, and states through them.

A record is a run of int64 numbers: the head that `tiles` names, addresses and keys, five numbers
for each of three states, the constants of the rule as fp32 bit patterns, and where rows lie in the
whole parameter (`codecs.blocks.Strides`). `tables` writes it.
"""

import triton
import triton.language as tl

from stquant.kernels.triton import codec
from stquant.kernels.triton.codec import LOG, PLAIN
from stquant.kernels.triton.tiles import BFLOAT16, FLOAT16, FLOAT32, ROW, load, only_live, places_of, store

PARAM, GRAD, RESIDUAL, WEIGHT_KEY = tl.constexpr(3), tl.constexpr(4), tl.constexpr(5), tl.constexpr(6)
STATES = tl.constexpr(7)
STATE_SIZE = tl.constexpr(5)
DATA, SCALES, KEY, LOWEST, SHIFT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3), tl.constexpr(4)
CONSTANTS = tl.constexpr(22)
FIRST_ELEMENT, RUN, JUMP, PITCH = tl.constexpr(31), tl.constexpr(32), tl.constexpr(33), tl.constexpr(34)
SIZE = tl.constexpr(36)

# Whether rounding is stochastic, as NOISY and STOCHASTIC say it: 0, 1, or this.
APART = tl.constexpr(2)


@triton.jit
def constant(item, index: tl.constexpr):
    """A constant of the rule, fp32."""
    return tl.load(item + CONSTANTS + index).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def state_field(item, index: tl.constexpr, field: tl.constexpr):
    """A number of one of the item's states."""
    return tl.load(item + STATES + index * STATE_SIZE + field)


@triton.jit
def levels(item, index: tl.constexpr):
    """Bit pattern of the lowest level of a LOG state, and the shift of a code to its level."""
    return state_field(item, index, LOWEST).to(tl.int32), state_field(item, index, SHIFT).to(tl.int32)


@triton.jit
def random_bits(item, key, tile, NOISY: tl.constexpr):
    """32 random bits for each element of a tile; rows may lie APART in the whole parameter."""
    if NOISY == APART:
        place, lane = places_of(tile)[1], places_of(tile)[2]
        return codec.random_bits(key, _starts(item, tile), place * tile.lanes + lane)
    else:
        return codec.random_bits(key, tl.load(item + FIRST_ELEMENT) + tile.origin, tile.element)


@triton.jit
def _starts(item, tile):
    """Index of each block's first element in the whole parameter, int64 `[blocks, 1, 1]`."""
    block: tl.constexpr = 8 * tile.element.shape[2]
    number = tile.start + places_of(tile)[0]
    per_row = (tl.load(item + ROW) + block - 1) // block
    row = number // per_row
    run = tl.load(item + RUN)
    row_start = tl.load(item + FIRST_ELEMENT) + row // run * tl.load(item + JUMP) + row % run * tl.load(item + PITCH)
    return row_start + (number - row * per_row) * block


@triton.jit
def load_scale(item, tile, index: tl.constexpr):
    """Scales `[blocks, 1, 1]` of a state."""
    scales = state_field(item, index, SCALES).to(tl.pointer_type(tl.float32))
    return tl.load(scales + tile.start + places_of(tile)[0], mask=tile.alive, other=0.0)


@triton.jit
def load_state(item, tile, index: tl.constexpr, FAMILY: tl.constexpr, BITS: tl.constexpr):
    """A state, decoded; zeros where no element lives."""
    data = state_field(item, index, DATA)
    if FAMILY == PLAIN:
        return load(data, tile, FLOAT32)
    else:
        code = codec.unpack(data, tile, BITS)
        lowest, shift = levels(item, index)
        return only_live(tile, codec.decode(code, load_scale(item, tile, index), lowest, shift, FAMILY, BITS))


@triton.jit
def store_state(
    item, tile, index: tl.constexpr, value, scale, FAMILY: tl.constexpr, BITS: tl.constexpr, NOISY: tl.constexpr
):
    """Encode finite values into a packed state with the given scales; return what they decode to."""
    lowest, shift = levels(item, index)
    random = random_bits(item, state_field(item, index, KEY), tile, NOISY) if NOISY else 0
    code = codec.encode(value, scale, lowest, shift, random, FAMILY, BITS, NOISY)
    codec.pack(state_field(item, index, DATA), tile, code, BITS)
    scales = state_field(item, index, SCALES).to(tl.pointer_type(tl.float32))
    tl.store(scales + tile.start + places_of(tile)[0], scale, mask=tile.alive)
    return codec.decode(code, scale, lowest, shift, FAMILY, BITS)


@triton.jit
def encode_state(item, tile, index: tl.constexpr, value, FAMILY: tl.constexpr, BITS: tl.constexpr):
    """Encode finite values to nearest, with scales of their own."""
    if FAMILY == LOG:
        value = tl.where(value < 0.0, 0.0, value)
        scale = codec.block_mean(value, tile)
    else:
        scale = codec.signed_scale(value, tile, FAMILY)
    store_state(item, tile, index, value, scale, FAMILY, BITS, False)


@triton.jit
def load_weight(item, tile, DTYPE: tl.constexpr, RESIDUAL_BITS: tl.constexpr):
    """The weights in fp32, residuals joined."""
    weight = load(tl.load(item + PARAM), tile, DTYPE)
    if RESIDUAL_BITS > 0:
        code = codec.unpack(tl.load(item + RESIDUAL), tile, RESIDUAL_BITS)
        weight = codec.join(weight, code, RESIDUAL_BITS)
    return weight


@triton.jit
def store_weight(item, tile, weight, DTYPE: tl.constexpr, RESIDUAL_BITS: tl.constexpr, STOCHASTIC: tl.constexpr):
    """Store the weights, rounded as the item says."""
    noisy: tl.constexpr = STOCHASTIC if RESIDUAL_BITS < 16 else 0
    random = random_bits(item, tl.load(item + WEIGHT_KEY), tile, noisy) if noisy else 0
    if RESIDUAL_BITS > 0 or (noisy and DTYPE == BFLOAT16):
        weight, code = codec.split(weight, random, RESIDUAL_BITS, noisy)
        codec.pack(tl.load(item + RESIDUAL), tile, code, RESIDUAL_BITS)
    elif noisy and DTYPE == FLOAT16:
        weight = codec.round_to_half(weight, random)
    store(tl.load(item + PARAM), tile, weight, DTYPE)


@triton.jit
def load_grad(item, tile, weight, decay, DTYPE: tl.constexpr, MAXIMIZE: tl.constexpr, DECAYED: tl.constexpr):
    """The gradient to descend, with coupled weight decay."""
    grad = load(tl.load(item + GRAD), tile, DTYPE)
    if MAXIMIZE:
        grad = -grad
    if DECAYED:
        grad = grad + decay * weight
    return grad


@triton.jit
def store_momentum(item, tile, value, finite, FAMILY: tl.constexpr, BITS: tl.constexpr):
    """Store the item's first state; return what rounding dropped, zero for a plain one."""
    if FAMILY == PLAIN:
        store(state_field(item, 0, DATA), tile, value, FLOAT32)
        return value
    else:
        kept = only_live(tile, tl.where(finite, value, 0.0))
        scale = codec.signed_scale(kept, tile, FAMILY)
        return kept - store_state(item, tile, 0, kept, scale, FAMILY, BITS, False)
