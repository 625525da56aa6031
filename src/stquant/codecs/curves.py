"""Codes to values and back: the arithmetic of each family, once.

Three families, all built from fp32 `+ - * /` and integer operations, so that every backend can
give the same bits:

- DYNAMIC places a few levels by hand (Dettmers et al., "8-bit Optimizers via Block-wise
  Quantization", 2021, section 1.3, gives the idea of a dynamic map). The scale carries the sign
  of the block's largest magnitude, which therefore always sits on the level 1.
- MULAW stores sign and magnitude. The magnitude plus a bias of 1.5 is read as a float whose bit
  pattern counts the levels: two octaves, linear inside each, as the companding law of ITU-T G.711
  does for sound.
- LOG stores a ratio to the block mean. Its levels are floats whose bit patterns are evenly
  spaced: linear inside an octave, geometric across octaves.

A code is an integer of `bits` bits; code 0 is the value zero (LOG: the lowest level). Signed
codes are sign (top bit) and magnitude; negative zero stands for +1 in DYNAMIC and is never
produced in MULAW. The families of published recipes are in `recipes`; the functions here hand
them over.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from stquant.codecs import recipes
from stquant.codecs.format import Family, Format, Octaves

TINY = 2.0**-100
"""Scales below are treated as zero: their reciprocals would leave the range of fp32."""

_ONE = 0x3F800000
_BIAS = 1.5
_BIAS_PATTERN = 0x3FC00000
_MANTISSA = 23

DYNAMIC_LEVELS = {
    0: (0.0,),
    2: (0.0, 0.55, 1.0, -0.55),
    3: (0.0, 0.055, 0.325, 0.775, 1.0, -0.055, -0.325, -0.775),
}
"""Levels by code. Negative levels mirror the positive ones below 1."""

DEFAULT_OCTAVES = {
    0: Octaves(0, 0),
    1: Octaves(-2, 1),
    2: Octaves(-4, 1),
    3: Octaves(-5, 0),
    4: Octaves(-5, -1),
    5: Octaves(-5, -2),
    6: Octaves(-5, -3),
    8: Octaves(-5, -5),
}
"""Where the levels of a LOG state start out, by bits."""


def default_octaves(format: Format) -> Octaves:
    """Octaves of a fresh state of `format`; (0, 0) for families that have none."""
    return DEFAULT_OCTAVES[format.bits] if format.family is Family.LOG else Octaves(0, 0)


def levels(format: Format, octaves: Octaves | None = None) -> Tensor:
    """Return the value of every code relative to the block's scale.

    Args:
        format: A packed format.
        octaves: Placement of LOG levels; the default of the format if None.

    Returns:
        fp32 tensor of `2**bits` values, indexed by code; NaN marks a code that is never produced.
    """
    if recipes.is_recipe(format):
        return recipes.levels(format)
    codes = torch.arange(2**format.bits, dtype=torch.int32)
    values = decode(format, codes, torch.ones(1), octaves or default_octaves(format))
    if format.family is Family.MULAW:
        values[2 ** (format.bits - 1)] = float("nan")
    return values


def block_scale(format: Format, blocks: Tensor, width: int | None = None) -> Tensor:
    """Scale of each block of a format whose scales are taken from the values.

    Args:
        format: A format of any family but LOG.
        blocks: fp32 values `[..., block]`, finite.
        width: Elements of a row of `[rows, blocks, block]`; None if every block is full.

    Returns:
        fp32 `[...]`: the largest magnitude, for DYNAMIC with the sign of that element (positive
        if both signs reach it); 0 where the magnitude is below `TINY`.
    """
    if recipes.is_recipe(format):
        return recipes.block_scale(format, blocks, width)
    top, bottom = blocks.amax(-1), -blocks.amin(-1)
    largest = torch.maximum(top, bottom)
    if format.family is Family.DYNAMIC:
        largest = torch.where(top >= bottom, largest, -largest)
    return torch.where(largest.abs() < TINY, torch.zeros_like(largest), largest)


def encode(format: Format, values: Tensor, scale: Tensor, octaves: Octaves, random: Tensor | None = None) -> Tensor:
    """Round values to codes.

    Args:
        format: A packed format.
        values: fp32 values, finite; non-negative for LOG.
        scale: fp32 scales, broadcastable to `values`.
        octaves: Placement of LOG levels.
        random: Integers below 2**32, one per value (int64); needed if the format is stochastic.

    Returns:
        int32 codes of the shape of `values`; 0 where the scale counts as zero.
    """
    if format.family is Family.LOG:
        return _encode_log(format.bits, values * _reciprocal(scale), octaves, random)
    if format.family is Family.MULAW:
        return _encode_mulaw(format.bits, values, scale)
    if recipes.is_recipe(format):
        return recipes.encode(format, values, scale, random)
    return _encode_dynamic(format.bits, values * _reciprocal(scale))


def decode(format: Format, codes: Tensor, scale: Tensor, octaves: Octaves) -> Tensor:
    """Return the fp32 values of integer codes; the inverse of `encode` up to rounding."""
    if format.family is Family.LOG:
        return torch.where(scale < TINY, scale, _log_levels(codes, octaves) * scale)
    if format.family is Family.MULAW:
        return _decode_mulaw(format.bits, codes, scale)
    if recipes.is_recipe(format):
        return recipes.decode(format, codes, scale)
    table = torch.tensor(DYNAMIC_LEVELS[format.bits], dtype=torch.float32, device=codes.device)
    return table[codes] * scale


def _encode_dynamic(bits: int, ratio: Tensor) -> Tensor:
    """Compare the magnitude with the midpoints between levels; a midpoint rounds up."""
    codes = torch.zeros_like(ratio, dtype=torch.int32)
    sign_bit = 2 ** (bits - 1)
    ladder = [level for level in DYNAMIC_LEVELS[bits] if level >= 0]
    for code, (low, high) in enumerate(itertools.pairwise(ladder), start=1):
        middle = (low + high) / 2
        codes += (ratio >= middle).int()
        if code < sign_bit:
            codes += (ratio <= -middle).int() * (sign_bit + 1 if code == 1 else 1)
    return codes


def _mulaw_span(bits: int) -> float:
    """Distance from the bias to the top level, before scaling: 4.5 - 2^(4-bits)."""
    return 4.5 - 2.0 ** (4 - bits)


def _encode_mulaw(bits: int, values: Tensor, scale: Tensor) -> Tensor:
    shift = _MANTISSA - (bits - 2)
    stretch = torch.where(scale < TINY, torch.zeros_like(scale), torch.full_like(scale, _mulaw_span(bits)) / scale)
    biased = values.abs() * stretch + _BIAS
    magnitude = (biased.view(torch.int32) - (_BIAS_PATTERN - (1 << (shift - 1)))) >> shift
    magnitude = magnitude.clamp(max=2 ** (bits - 1) - 1)
    return torch.where((values < 0) & (magnitude > 0), magnitude | 2 ** (bits - 1), magnitude)


def _decode_mulaw(bits: int, codes: Tensor, scale: Tensor) -> Tensor:
    shift = _MANTISSA - (bits - 2)
    sign_bit = 2 ** (bits - 1)
    biased = (_BIAS_PATTERN + ((codes.int() & (sign_bit - 1)) << shift)).view(torch.float32)
    unit = scale / torch.full_like(scale, _mulaw_span(bits))
    values = (biased - _BIAS) * unit
    return torch.where((codes & sign_bit) != 0, -values, values)


def _encode_log(bits: int, ratio: Tensor, octaves: Octaves, random: Tensor | None) -> Tensor:
    """Round on the bit pattern: half a step or random low bits are added, then cut off."""
    if bits == 0:
        return torch.zeros_like(ratio, dtype=torch.int32)
    shift = _MANTISSA + octaves.log2_step
    above = (ratio.view(torch.int32) - (_ONE + (octaves.lo << _MANTISSA))).clamp(min=0)
    addend = 1 << (shift - 1) if random is None else (random >> (32 - shift)).int()
    return ((above + addend) >> shift).clamp(max=2**bits - 1)


def _log_levels(codes: Tensor, octaves: Octaves) -> Tensor:
    lowest = _ONE + (octaves.lo << _MANTISSA)
    return (lowest + (codes.int() << (_MANTISSA + octaves.log2_step))).view(torch.float32)


def _reciprocal(scale: Tensor) -> Tensor:
    usable = scale.abs() >= TINY
    return torch.where(usable, torch.ones_like(scale) / torch.where(usable, scale, 1.0), 0.0)
