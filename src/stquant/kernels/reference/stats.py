"""What a stored state looks like, in a few integers.

All sums are int64, so that pieces, threads, shards and devices cannot change them: partial
results add up exactly, in any order. Relative quantities are in units of 2**-30; energies, whose
range is that of fp32 squared, are fixed-point numbers in bins of 16 octaves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from stquant.codecs import blocks, curves, recipes
from stquant.codecs.blocks import Piece
from stquant.codecs.format import Family, Format
from stquant.kernels.ops import Packed
from stquant.kernels.reference import codec
from stquant.kernels.reference.pieces import PIECE

UNIT = 2.0**-30
"""Unit of the relative sums."""

ENERGY_BINS = 32
"""Bins of `energy`; bin i holds squares from 2**(16*i - 256) up."""

_BIN_OCTAVES = 8
_LOWEST_EXPONENT = -128
_FRACTION = 2.0**14


@dataclass(frozen=True, slots=True)
class StateStats:
    """Sums over a packed state; two of them add up to those of the union.

    Attributes:
        elements: Number of elements.
        zeros: Elements that decode to zero.
        saturated: Elements on the outermost levels.
        ratio: Sum of |value / scale|, in units of 2**-30.
        ratio2: Sum of its square.
        ratio4: Sum of its fourth power.
        energy: Sum of squared values in bins of 16 octaves, int64 `[32]`; see `total_energy`.
    """

    elements: int
    zeros: int
    saturated: int
    ratio: int
    ratio2: int
    ratio4: int
    energy: tuple[int, ...]

    def __add__(self, other: StateStats) -> StateStats:
        bins = tuple(a + b for a, b in zip(self.energy, other.energy, strict=True))
        sums: dict[str, int] = {name: getattr(self, name) + getattr(other, name) for name in _SUMS}
        return StateStats(**sums, energy=bins)

    @property
    def total_energy(self) -> float:
        """Sum of squared values, in double; each term is exact to 2**-14 of its square root."""
        scale = 2.0 * _LOWEST_EXPONENT
        return math.fsum(n / _FRACTION * 2.0 ** (scale + 2 * _BIN_OCTAVES * i) for i, n in enumerate(self.energy))


_SUMS = ("elements", "zeros", "saturated", "ratio", "ratio2", "ratio4")


def state_stats(state: Packed) -> StateStats:
    """Measure a packed state as it is stored.

    Args:
        state: A packed state; not changed.

    Returns:
        Its sums. Relative quantities are relative to the block's mean for a LOG state, to its
        largest magnitude for others.
    """
    total = StateStats(0, 0, 0, 0, 0, 0, (0,) * ENERGY_BINS)
    for piece in state.grid.pieces(PIECE):
        codes = codec.load_codes(state, piece)
        values = codec.load(state, piece)
        ratio = _relative(state, piece, codes)
        total += StateStats(
            elements=values.numel(),
            zeros=int((values == 0).sum()),
            saturated=int(outermost(state.format, codes).sum()),
            ratio=_fixed(ratio),
            ratio2=_fixed(ratio * ratio),
            ratio4=_fixed(ratio * ratio * (ratio * ratio)),
            energy=_energy(values),
        )
    return total


def _relative(state: Packed, piece: Piece, codes: Tensor) -> Tensor:
    if recipes.is_recipe(state.format):
        unit = recipes.unit_scale(state.format, state.scales[piece.rows, piece.blocks])[:, :, None]
        cut = blocks.to_blocks(codes, state.grid.block)
        return blocks.from_blocks(recipes.decode(state.format, cut, unit), piece.width).abs()
    one = torch.ones(1, dtype=torch.float32, device=codes.device)
    return curves.decode(state.format, codes, one, state.octaves).abs()


def outermost(format: Format, codes: Tensor) -> Tensor:
    """Whether a code is the top level: the magnitude's for signed families, the level's for others."""
    bits, family = format.bits, format.family
    if bits == 0:
        return torch.zeros_like(codes, dtype=torch.bool)
    if recipes.is_recipe(format):
        produced = int((~recipes.levels(format).isnan()).sum())
        return torch.eq(codes, produced - 1) | (torch.eq(codes, 0) & format.signed)
    if family is Family.LOG:
        return torch.eq(codes, 2**bits - 1)
    top = 2 ** (bits - 1)
    outer = torch.eq(codes & (top - 1), top - 1)
    if family is not Family.DYNAMIC:
        return outer
    # Of the positive codes only +1 is outermost, and that is the code of negative zero.
    return torch.eq(codes, top) | (outer & torch.ge(codes, top))


def _fixed(ratio: Tensor) -> int:
    return int((ratio.double() / UNIT).round().long().sum())


def _energy(values: Tensor) -> tuple[int, ...]:
    """Sum squares as fixed point, each in the bin of its exponent; infinite values are left out."""
    magnitude = torch.where(values.isfinite(), values.abs(), 0.0).double()
    exponent = torch.frexp(magnitude).exponent - 1
    bins = ((exponent - _LOWEST_EXPONENT).clamp(min=0) // _BIN_OCTAVES).clamp(max=ENERGY_BINS - 1)
    mantissa = torch.ldexp(magnitude, -(_LOWEST_EXPONENT + _BIN_OCTAVES * bins))
    fixed = (mantissa * mantissa * _FRACTION).round().long()
    totals = torch.zeros(ENERGY_BINS, dtype=torch.int64, device=values.device)
    totals.scatter_add_(0, bins.flatten().long(), fixed.flatten())
    return tuple(int(n) for n in totals)
