"""What a number format is: one frozen record, everything else derived from it.

A packed format stores blocks of codes with a scale per block. How a code becomes a value is the
business of the format's family (`curves`, `recipes`), how codes become bytes that of `packing`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

import torch

from stquant.errors import FormatError

MIN_BLOCK = 32
"""Smallest block; below it the scales would outweigh the codes."""


class Family(Enum):
    """How codes map to values."""

    FLOAT32 = "float32"
    """Not packed: a plain fp32 tensor."""
    DYNAMIC = "dynamic"
    """Signed, a few hand-placed levels relative to the block's largest magnitude."""
    MULAW = "mulaw"
    """Signed, magnitudes that grow linearly inside octaves above a bias."""
    LOG = "log"
    """Non-negative, levels that grow linearly inside octaves, relative to the block's mean."""

    TREE = "tree"
    """Signed, even fractions inside decimal exponents; this and what follows are `recipes`."""
    UNSIGNED_TREE = "unsigned tree"
    """Non-negative, even fractions inside decimal exponents."""
    LINEAR = "linear"
    """Non-negative, evenly spaced, without zero."""
    NORMAL = "normal"
    """Signed, quantiles of the normal distribution."""
    SOFTSIGN = "softsign"
    """Signed, evenly spaced in 2z / (1 + |z|)."""
    ROOT = "root"
    """Non-negative, evenly spaced in the square root."""
    GEOMETRIC = "geometric"
    """Non-negative, powers of a base that each block has for itself."""


RECIPE_FAMILIES = frozenset(
    (
        *(Family.TREE, Family.UNSIGNED_TREE, Family.LINEAR, Family.NORMAL),
        *(Family.SOFTSIGN, Family.ROOT, Family.GEOMETRIC),
    )
)
"""Families of published recipes, for comparison and migration."""

_NON_NEGATIVE = (Family.LOG, Family.UNSIGNED_TREE, Family.LINEAR, Family.ROOT, Family.GEOMETRIC)


class Rounding(Enum):
    """How a value between two levels picks one."""

    NEAREST = "nearest"
    STOCHASTIC = "stochastic"


class Octaves(NamedTuple):
    """Placement of the levels of a LOG state: lowest level and distance, in octaves of the mean.

    Run-time operands of a state rather than a part of its format: they may follow the data.
    """

    lo: int
    """log2 of the lowest level relative to the block mean."""
    log2_step: int
    """log2 of the distance between levels; from 1 (two octaves) down to -5 (1/32 octave)."""


@dataclass(frozen=True, slots=True)
class Format:
    """How one optimizer state is stored.

    Attributes:
        number: Stable number in the catalogue; this is what a checkpoint holds.
        name: Name in the catalogue.
        family: Rule that maps codes to values.
        bits: Width of a code; 32 for FLOAT32.
        rounding: How values between levels are rounded.
        prepay: Whether the rounding error of a momentum is applied to the weight at once.
        block: Elements that share a scale: a power of two, at least 32.
    """

    number: int
    name: str
    family: Family
    bits: int
    rounding: Rounding = Rounding.NEAREST
    prepay: bool = False
    block: int = 128

    def __post_init__(self) -> None:
        if self.block < MIN_BLOCK or self.block & (self.block - 1):
            raise FormatError(
                f"block={self.block} is not a power of two of at least {MIN_BLOCK}; use for example block=128"
            )

    @property
    def packed(self) -> bool:
        """Whether states are stored as codes and scales."""
        return self.family is not Family.FLOAT32

    @property
    def signed(self) -> bool:
        """Whether negative values can be stored."""
        return self.family not in _NON_NEGATIVE

    @property
    def averaged(self) -> bool:
        """Whether the scale is the running mean of its block rather than taken from the values."""
        return self.family is Family.LOG

    @property
    def stochastic(self) -> bool:
        """Whether encoding draws random numbers."""
        return self.rounding is Rounding.STOCHASTIC

    @property
    def scale_dtype(self) -> torch.dtype:
        """fp32, because narrower scales stall or underflow; fp16 where a recipe has it so."""
        return torch.float16 if self.family in (Family.SOFTSIGN, Family.ROOT) else torch.float32

    @property
    def scale_parts(self) -> tuple[int, ...]:
        """Trailing dimensions of a block's scale: none, or two numbers for GEOMETRIC."""
        return (2,) if self.family is Family.GEOMETRIC else ()

    @property
    def bits_per_element(self) -> float:
        """Bits of a full block per element, scale included."""
        scale_bits = 8 * self.scale_dtype.itemsize * math.prod(self.scale_parts)
        return self.bits + scale_bits / self.block if self.packed else float(self.bits)

    def with_block(self, block: int) -> Format:
        """Return the same format with another block size."""
        return replace(self, block=block)
