"""The codec arithmetic as device functions, once: unpack and decode, encode and pack.

Every operation and its order are those of `codecs.curves`, `packing`, `residual` and `rounding`.
Three habits keep the bits equal on every device: division and square root are the correctly
rounded ones (`div_rn`, `sqrt_rn`), launches forbid fused multiply-add, and a block's sum is built
from sums of two, whose order cannot matter.
"""

import triton
import triton.language as tl

from stquant.kernels.triton.tiles import places_of

PLAIN = tl.constexpr(1)
DYNAMIC = tl.constexpr(2)
MULAW = tl.constexpr(3)
LOG = tl.constexpr(4)

TINY = tl.constexpr(2.0**-100)
ONE = tl.constexpr(0x3F800000)
BIAS = tl.constexpr(0x3FC00000)
INFINITY = tl.constexpr(0x7F800000)
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
LARGEST_BF16 = tl.constexpr(0x7F7F0000)
CANONICAL_NAN = tl.constexpr(0x7FC00000)


@triton.jit
def pattern_of(x):
    """Bit pattern of fp32 values, int32."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def float_of(pattern):
    """The fp32 values of int32 bit patterns."""
    return pattern.to(tl.float32, bitcast=True)


@triton.jit
def is_finite(x):
    """Whether fp32 values are finite."""
    return (pattern_of(x) & INFINITY) != INFINITY


# ---------------------------------------------------------------------------------- packing


@triton.jit
def _planes(address, tile, BITS: tl.constexpr):
    lane = places_of(tile)[2]
    return address.to(tl.pointer_type(tl.uint8)) + BITS * tile.origin_lane + (BITS * tile.lane + lane)


@triton.jit
def _live_lanes(tile):
    return tile.alive if tile.live.shape[1] == 1 else tile.alive & (places_of(tile)[2] < tile.lanes)


@triton.jit
def unpack(address, tile, BITS: tl.constexpr):
    """Codes of a tile, int32 `[blocks, 8, lanes]`; zeros where no element lives."""
    place = places_of(tile)[1]
    planes, live = _planes(address, tile, BITS), _live_lanes(tile)
    if BITS == 0:
        return tl.full(tile.element.shape, 0, tl.int32)
    elif BITS % 8 == 0:
        planes = planes + place * (BITS // 8) * tile.lanes
        code = tl.load(planes, mask=live, other=0).to(tl.int32)
        if BITS == 16:
            code |= tl.load(planes + tile.lanes, mask=live, other=0).to(tl.int32) << 8
        return code
    else:
        word = tl.load(planes, mask=live, other=0).to(tl.uint64 if BITS > 4 else tl.uint32)
        for plane in tl.static_range(1, BITS):
            word |= tl.load(planes + plane * tile.lanes, mask=live, other=0).to(word.dtype) << (8 * plane)
        return ((word >> (BITS * place).to(word.dtype)) & ((1 << BITS) - 1)).to(tl.int32)


@triton.jit
def pack(address, tile, code, BITS: tl.constexpr):
    """Store the codes of a tile; the padding of a short block becomes zero bits."""
    if BITS > 0:
        place = places_of(tile)[1]
        planes, live = _planes(address, tile, BITS), _live_lanes(tile)
        if tile.live.shape[1] != 1:
            code = tl.where(tile.live, code, 0)
        if BITS % 8 == 0:
            planes = planes + place * (BITS // 8) * tile.lanes
            tl.store(planes, code.to(tl.uint8), mask=live)
            if BITS == 16:
                tl.store(planes + tile.lanes, (code >> 8).to(tl.uint8), mask=live)
        else:
            bits = code.to(tl.uint64 if BITS > 4 else tl.uint32)
            word = tl.sum(bits << (BITS * place).to(bits.dtype), axis=1, keep_dims=True)
            for plane in tl.static_range(BITS):
                tl.store(planes + plane * tile.lanes, (word >> (8 * plane)).to(tl.uint8), mask=live)


# ---------------------------------------------------------------------------------- curves


@triton.jit
def reciprocal(scale):
    """1 / scale, or 0 where the scale counts as zero."""
    usable = tl.abs(scale) >= TINY
    return tl.where(usable, tl.div_rn(1.0, tl.where(usable, scale, 1.0)), 0.0)


@triton.jit
def decode(code, scale, lowest, shift, FAMILY: tl.constexpr, BITS: tl.constexpr):
    """Values of codes; `lowest` and `shift` place the levels of LOG."""
    if FAMILY == LOG:
        level = float_of(lowest + (code << shift))
        return tl.where(scale < TINY, scale, level * scale)
    elif FAMILY == MULAW:
        span: tl.constexpr = 4.5 - 2.0 ** (4 - BITS)
        sign_bit: tl.constexpr = 1 << (BITS - 1)
        value = (float_of(((code & (sign_bit - 1)) << (25 - BITS)) + BIAS) - 1.5) * tl.div_rn(scale, span)
        return tl.where((code & sign_bit) != 0, -value, value)
    else:
        return _dynamic_level(code, BITS) * scale


@triton.jit
def _dynamic_level(code, BITS: tl.constexpr):
    level = tl.full(code.shape, 0.0, tl.float32)
    if BITS == 2:
        level = tl.where(code == 1, 0.55, tl.where(code == 2, 1.0, tl.where(code == 3, -0.55, level)))
    elif BITS == 3:
        size = code & 3
        magnitude = tl.where(size == 1, 0.055, tl.where(size == 2, 0.325, tl.where(size == 3, 0.775, level)))
        level = tl.where(code == 4, 1.0, tl.where(code > 4, -magnitude, magnitude))
    return level


@triton.jit
def encode(value, scale, lowest, shift, random, FAMILY: tl.constexpr, BITS: tl.constexpr, NOISY: tl.constexpr):
    """Codes of finite values, int32; `random` is used if NOISY."""
    if FAMILY == MULAW:
        return _encode_mulaw(value, scale, BITS)
    elif FAMILY == DYNAMIC:
        return _encode_dynamic(value * reciprocal(scale), BITS)
    elif BITS == 0:
        return tl.full(value.shape, 0, tl.int32)
    else:
        above = tl.maximum(pattern_of(value * reciprocal(scale)) - lowest, 0)
        if NOISY:
            addend = (random >> (32 - shift).to(tl.uint32)).to(tl.int32)
        else:
            addend = tl.full(above.shape, 1, tl.int32) << (shift - 1)
        return tl.minimum((above + addend) >> shift, (1 << BITS) - 1)


@triton.jit
def _encode_mulaw(value, scale, BITS: tl.constexpr):
    span: tl.constexpr = 4.5 - 2.0 ** (4 - BITS)
    cut: tl.constexpr = 25 - BITS
    top: tl.constexpr = (1 << (BITS - 1)) - 1
    zero = scale < TINY
    stretch = tl.where(zero, 0.0, tl.div_rn(span, tl.where(zero, 1.0, scale)))
    biased = tl.abs(value) * stretch + 1.5
    magnitude = tl.minimum((pattern_of(biased) - (BIAS - (1 << (cut - 1)))) >> cut, top)
    return tl.where((value < 0) & (magnitude > 0), magnitude | (top + 1), magnitude)


@triton.jit
def _encode_dynamic(ratio, BITS: tl.constexpr):
    if BITS == 0:
        code = tl.full(ratio.shape, 0, tl.int32)
    elif BITS == 2:
        code = (ratio >= (0.0 + 0.55) / 2).to(tl.int32) + (ratio >= (0.55 + 1.0) / 2).to(tl.int32)
        code += (ratio <= -(0.0 + 0.55) / 2).to(tl.int32) * 3
    else:
        code = (ratio >= (0.0 + 0.055) / 2).to(tl.int32) + (ratio >= (0.055 + 0.325) / 2).to(tl.int32)
        code += (ratio >= (0.325 + 0.775) / 2).to(tl.int32) + (ratio >= (0.775 + 1.0) / 2).to(tl.int32)
        code += (ratio <= -(0.0 + 0.055) / 2).to(tl.int32) * 5
        code += (ratio <= -(0.055 + 0.325) / 2).to(tl.int32) + (ratio <= -(0.325 + 0.775) / 2).to(tl.int32)
    return code


# ------------------------------------------------------------------------- block quantities


@triton.jit
def signed_scale(value, tile, FAMILY: tl.constexpr):
    """Scale `[blocks, 1, 1]` of blocks of finite values, for DYNAMIC with the sign of the largest."""
    flat = tl.reshape(value, [value.shape[0], 8 * value.shape[2]])
    top, bottom = tl.max(flat, axis=1), -tl.min(flat, axis=1)
    largest = tl.maximum(top, bottom)
    if FAMILY == DYNAMIC:
        largest = tl.where(top >= bottom, largest, -largest)
    return tl.where(tl.abs(largest) < TINY, 0.0, largest)[:, None, None]


@triton.jit
def block_mean(value, tile):
    """Mean `[blocks, 1, 1]` by the halving tree; dead elements must be zero."""
    blocks: tl.constexpr = value.shape[0]
    half: tl.constexpr = 4 * value.shape[2]
    sums = tl.reshape(value, [blocks, 2 * half])
    if tile.live.shape[1] != 1:
        # A branch at run time inside one at compile time.
        if tl.min(tl.reshape(tile.size, [blocks]), axis=0) < 2 * half:
            sums = _in_order(sums, tile)
    for level in tl.static_range(10):
        if (half >> level) > 0:
            # A sum of two: whatever order the compiler takes, it is the tree's.
            sums = tl.sum(tl.reshape(sums, [blocks, 2, half >> level]), axis=1)
    if blocks == 1:
        # A scalar, as threads that hold all of a tensor of one number could come to hold all of the tile.
        total = tl.full([1, 1, 1], tl.sum(tl.reshape(sums, [1]), axis=0), tl.float32)
    else:
        total = tl.reshape(sums, [blocks, 1, 1])
    return tl.div_rn(total, tile.size.to(tl.float32))


@triton.jit
def _in_order(value, tile):
    """Bring the elements of short blocks, whose lanes are fewer, to their places in the tree."""
    blocks: tl.constexpr = value.shape[0]
    block: tl.constexpr = value.shape[1]
    place = tl.arange(0, block)[None, :]
    lanes, size = tl.reshape(tile.lanes, [blocks, 1]), tl.reshape(tile.size, [blocks, 1])
    source = tl.minimum(place // lanes * (block // 8) + place % lanes, block - 1)
    return tl.where(place < size, tl.gather(value, source, axis=1), 0.0)


# -------------------------------------------------------------------- random numbers, weights


@triton.jit
def random_bits(key, origin, element):
    """32 random bits, uint32, of a 64-bit key for elements `origin + element`; `origin` is int64."""
    if element.dtype == tl.int32:
        # A carry tells the upper word.
        low = origin.to(tl.uint32) + element.to(tl.uint32)
        high = (origin >> 32).to(tl.uint32) + (low < origin.to(tl.uint32)).to(tl.uint32)
    else:
        index = origin + element
        low, high = index.to(tl.uint32), (index >> 32).to(tl.uint32)
    x = low ^ (high * 0x9E3779B1 ^ key.to(tl.uint32))
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = ((x ^ (x >> 15)) + (key >> 32).to(tl.uint32)) * 0xD35A2D97
    return x ^ (x >> 15)


@triton.jit
def join(weight, code, BITS: tl.constexpr):
    """The fp32 weights that bf16 weights (as fp32) and codes of residuals stand for."""
    signed = code - ((code >> (BITS - 1)) << BITS)
    return float_of(pattern_of(weight) + (signed << (16 - BITS)))


@triton.jit
def split(weight, random, BITS: tl.constexpr, NOISY: tl.constexpr):
    """The bf16 weights (as fp32) and codes of residuals that fp32 weights round to."""
    unit: tl.constexpr = 1 << (16 - BITS)
    largest: tl.constexpr = LARGEST_BF16 + (0x8000 - unit if BITS > 0 else 0)
    sign = pattern_of(weight) & ~MAGNITUDE
    magnitude = pattern_of(weight) & MAGNITUDE
    if NOISY:
        addend = (random >> (16 + BITS)).to(tl.int32)
    else:
        addend = tl.full(magnitude.shape, unit >> 1, tl.int32)
    rounded = tl.minimum((magnitude + addend) & ~(unit - 1), largest)
    rounded = tl.where(magnitude >= INFINITY, magnitude, rounded) | sign
    rounded = tl.where(magnitude > INFINITY, CANONICAL_NAN, rounded)
    upper = (rounded + 0x8000) & ~0xFFFF
    return float_of(upper), ((rounded - upper) >> (16 - BITS)) & ((1 << BITS) - 1)


@triton.jit
def round_to_half(x, random):
    """Round fp32 stochastically to values that fp16 holds."""
    magnitude = pattern_of(x) & MAGNITUDE
    exponent = tl.maximum(magnitude >> 23, 113)
    step, inverse = float_of((exponent - 10) << 23), float_of((264 - exponent) << 23)
    finite = magnitude < INFINITY
    quotient = tl.where(finite, float_of(magnitude) * inverse, 0.0)
    below = quotient.to(tl.int32).to(tl.float32)
    threshold = (random >> 16).to(tl.int32).to(tl.float32) * 2.0**-16
    rounded = (below + (quotient - below > threshold).to(tl.float32)) * step
    rounded = tl.where(rounded < 65504.0, rounded, 65504.0)
    return float_of(tl.where(finite, pattern_of(rounded), magnitude) | (pattern_of(x) & ~MAGNITUDE))
