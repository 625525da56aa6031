"""What a number format is: one frozen record, everything else derived from it.

A packed format stores blocks of codes with one fp32 scale per block. How a code becomes a value
is the business of the format's family (`curves`), how codes become bytes that of `packing`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from stquant.errors import FormatError

SCALE_BITS = 32
"""Scales are fp32: narrower ones stall or underflow when an average decays slowly."""

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
        return self.family is not Family.LOG

    @property
    def stochastic(self) -> bool:
        """Whether encoding draws random numbers."""
        return self.rounding is Rounding.STOCHASTIC

    @property
    def bits_per_element(self) -> float:
        """Bits of a full block per element, scale included."""
        return self.bits + SCALE_BITS / self.block if self.packed else float(self.bits)

    def with_block(self, block: int) -> Format:
        """Return the same format with another block size."""
        return replace(self, block=block)
