"""The catalogue as a table: what each format costs and what error it makes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stquant.codecs import blocks, catalog, curves
from stquant.codecs.format import Family, Format

SAMPLE_BLOCKS = 2048


def describe() -> list[dict[str, Any]]:
    """Return one row per packed format of the catalogue.

    Each row holds `name`, `number`, `family`, `state` (which kind of state it stores), `bits`,
    `block`, `true_bits` (with the scale of a full block), `levels` (distinct values of a code), `rounding`, `prepay`,
    `rms_error` (root mean square error of a sample relative to its root mean square, saturation
    included) and `value_bias` (largest relative difference between a value inside the range and
    the mean of what it is stored as; stochastic formats only).
    """
    return [_describe(format) for format in catalog.formats() if format.packed]


def _describe(format: Format) -> dict[str, Any]:
    levels = curves.levels(format)
    return {
        "name": format.name,
        "number": format.number,
        "family": format.family.value,
        "state": "signed" if format.signed else "non-negative",
        "bits": format.bits,
        "block": format.block,
        "true_bits": format.bits_per_element,
        "levels": len(set(levels[~levels.isnan()].tolist())),
        "rounding": format.rounding.value,
        "prepay": "yes" if format.prepay else "no",
        "rms_error": _rms_error(format),
        "value_bias": _value_bias(format) if format.stochastic else None,
    }


def _rms_error(format: Format) -> float:
    """Error on blocks of normal values; for averages of squares, on means of eight such squares."""
    generator = torch.Generator().manual_seed(0)
    sample = torch.randn(SAMPLE_BLOCKS, format.block, 8, generator=generator)
    octaves = curves.default_octaves(format)
    values = sample[..., 0] if format.signed else (sample * sample).mean(-1)
    if format.averaged:
        scale = blocks.block_mean(values[:, None], format.block)[:, 0]
    else:
        scale = curves.block_scale(format, values)
    random = torch.randint(1 << 32, values.shape, generator=generator) if format.stochastic else None
    codes = curves.encode(format, values, scale[:, None], octaves, random)
    error = curves.decode(format, codes, scale[:, None], octaves) - values
    return float((error.square().mean() / values.square().mean()).sqrt())


def _value_bias(format: Format) -> float | None:
    """Compare values between two levels with the mean of the levels they are rounded to."""
    if format.family is not Family.LOG:
        return None  # depends on the block
    if format.bits == 0:
        return 0.0
    levels = curves.levels(format)
    low, high = levels[:-1, None], levels[1:, None]
    share = torch.linspace(0, 1, 1025)
    patterns = _pattern(low) + share.double() * (_pattern(high) - _pattern(low))
    values = patterns.round().int().view(torch.float32)
    mean = low + share * (high - low)
    return float((mean / values - 1).abs().max())


def _pattern(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.int32).double()
