"""Random numbers for stochastic rounding, and rounding to 16-bit floats.

The generator is counter-based: the random bits of an element are a function of a 64-bit key and
the element's 64-bit index in the whole parameter, and of nothing else. So they do not depend on
threads, chunks, shards or devices, and a resumed run draws the same numbers. The mixing steps are
those of `lowbias32` (C. Wellons, "Prospecting for Hash Functions", 2018; constants of the
improved variant, avalanche bias 0.11), with the second key word injected between its two
multiplications; keys come from the finalizer of SplitMix64 (Steele, Lea and Flood, "Fast
Splittable Pseudorandom Number Generators", OOPSLA 2014).
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

_MASK32 = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF


class Stream(IntEnum):
    """What random numbers are drawn for; streams are independent."""

    EXP_AVG = 0
    EXP_AVG_SQ = 1
    WEIGHT = 2


def mix64(value: int) -> int:
    """Finalizer of SplitMix64: a bijection of 64-bit integers with full avalanche."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def key(seed: int, noise_id: int, stream: Stream, step: int) -> int:
    """Return the 64-bit key of one state of one parameter at one step.

    Args:
        seed: The optimizer's seed.
        noise_id: The parameter's number, given when its state was created.
        stream: What the numbers are for.
        step: The parameter's own step count.
    """
    return mix64(parameter_key(seed, noise_id, stream) ^ step)


def parameter_key(seed: int, noise_id: int, stream: Stream) -> int:
    """Return what the keys of all steps of one state of one parameter share."""
    return mix64(mix64(seed & _MASK64) ^ (noise_id << 2 | stream))


def keys(stems: Tensor, steps: Tensor) -> Tensor:
    """Return `key` on the device, without waiting for it.

    Args:
        stems: What `parameter_key` gives, as int64 bit patterns.
        steps: int64 step counts, one for each.

    Returns:
        The keys as int64 bit patterns, whose products and sums wrap around.
    """
    value = (stems ^ steps) + _signed(0x9E3779B97F4A7C15)
    value = (value ^ _shifted(value, 30)) * _signed(0xBF58476D1CE4E5B9)
    value = (value ^ _shifted(value, 27)) * _signed(0x94D049BB133111EB)
    return value ^ _shifted(value, 31)


def _signed(value: int) -> int:
    """The int64 that has the bits of an unsigned integer."""
    return value - (1 << 64) if value >> 63 else value


def _shifted(values: Tensor, places: int) -> Tensor:
    """Shift bit patterns to the right; zeros move in, whatever the sign."""
    return (values >> places) & ((1 << (64 - places)) - 1)


def random_bits(key: int, index: Tensor) -> Tensor:
    """Return 32 random bits for every element index.

    Args:
        key: 64-bit key.
        index: int64 element indices, row-major in the whole parameter.

    Returns:
        int64 integers in [0, 2**32) of the same shape.
    """
    x = (index ^ ((index >> 32) * 0x9E3779B1) ^ (key & _MASK32)) & _MASK32
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & _MASK32
    x = (((x ^ (x >> 15)) + (key >> 32)) * 0xD35A2D97) & _MASK32
    return x ^ (x >> 15)


def round_to_float16(values: Tensor, random: Tensor) -> Tensor:
    """Round fp32 values stochastically to fp16.

    Unbiased: the mean over the random numbers is the value itself up to 2**-16 of a step. A value
    that fp16 holds is returned unchanged; a finite one beyond its range becomes the largest.

    Args:
        values: fp32 values.
        random: int64 in [0, 2**32), one per value.
    """
    magnitude = values.abs().double()
    exponent = torch.frexp(magnitude.clamp(min=2.0**-14)).exponent - 1
    step = torch.ldexp(torch.ones_like(magnitude), exponent - 10)
    quotient = magnitude / step
    below = quotient.floor()
    threshold = (random >> 16).double() * 2.0**-16
    rounded = (below + (quotient - below > threshold)) * step
    rounded = torch.where(magnitude.isfinite(), rounded.clamp(max=65504.0), magnitude)
    return torch.copysign(rounded, values.double()).to(torch.float16)
