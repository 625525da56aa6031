"""A fp32 weight as a bf16 weight plus a residual of a few bits.

The weight is first rounded to a multiple of one unit, `2**(16 - bits)` in its bit pattern, and
then split exactly: bf16 takes the pattern rounded to a multiple of 2**16, the residual what is
left, a signed integer of `bits` bits. So 16 bits hold every weight exactly, 8 bits make a 24-bit
weight, and 0 bits are bf16 training with stochastic rounding. Whatever `join` returns splits into
the same two parts again: a step that changes nothing is an identity.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK32 = 0xFFFFFFFF
_SIGN = 0x80000000
_INFINITY = 0x7F800000
_LARGEST_BF16 = 0x7F7F0000
_CANONICAL_NAN = 0x7FC00000


def split(weight: Tensor, bits: int, random: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Split fp32 weights into bf16 weights and residuals.

    Args:
        weight: fp32 weights.
        bits: Bits of the residual, 0 to 16.
        random: int64 in [0, 2**32), one per weight, for stochastic rounding; None rounds to
            nearest, ties away from zero.

    Returns:
        bf16 weights, and residuals as int16 in units of 2**-16 of a bf16 step: multiples of
        `2**(16 - bits)`. NaN becomes the canonical NaN; a finite weight stays finite.
    """
    pattern = weight.view(torch.int32).long() & _MASK32
    magnitude = pattern & ~_SIGN
    unit = 1 << (16 - bits)
    addend = unit >> 1 if random is None else random >> (16 + bits)
    largest = _LARGEST_BF16 + (0x8000 - unit if bits else 0)
    rounded = ((magnitude + addend) & ~(unit - 1)).clamp(max=largest)
    rounded = torch.where(magnitude >= _INFINITY, magnitude, rounded) | (pattern & _SIGN)
    rounded = torch.where(magnitude > _INFINITY, _CANONICAL_NAN, rounded)
    upper = (rounded + 0x8000) >> 16
    return _to_int16(upper).view(torch.bfloat16), (rounded - (upper << 16)).to(torch.int16)


def join(weight: Tensor, residual: Tensor) -> Tensor:
    """Return the fp32 weights that bf16 weights and int16 residuals stand for, exactly."""
    upper = weight.contiguous().view(torch.int16).long() & 0xFFFF
    pattern = ((upper << 16) + residual.long()) & _MASK32
    return _to_int32(pattern).view(torch.float32)


def to_codes(residual: Tensor, bits: int) -> Tensor:
    """Return int16 residuals as unsigned codes of `bits` bits (two's complement)."""
    return (residual.int() >> (16 - bits)) & ((1 << bits) - 1)


def from_codes(codes: Tensor, bits: int) -> Tensor:
    """Return unsigned codes as int16 residuals; the inverse of `to_codes`."""
    if bits == 0:
        return torch.zeros_like(codes, dtype=torch.int16)
    signed = codes.int() - ((codes.int() >> (bits - 1)) << bits)
    return (signed << (16 - bits)).to(torch.int16)


def _to_int16(unsigned: Tensor) -> Tensor:
    return torch.where(unsigned >= 0x8000, unsigned - 0x10000, unsigned).to(torch.int16)


def _to_int32(unsigned: Tensor) -> Tensor:
    return torch.where(unsigned >= _SIGN, unsigned - 0x100000000, unsigned).to(torch.int32)
