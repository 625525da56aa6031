"""The rows of the tables: formats, shapes and sizes."""

from __future__ import annotations

from stquant.codecs import catalog
from stquant.codecs.format import Family, Format
from stquant.codecs.recipes import is_recipe

PACKED = [format for format in catalog.formats() if format.packed and not is_recipe(format)]
RECIPES = [format for format in catalog.formats() if is_recipe(format)]
SIGNED = [format for format in PACKED if format.signed]
NON_NEGATIVE = [format for format in PACKED if not format.signed]
STOCHASTIC = [format for format in PACKED if format.stochastic]
MULAW = [format for format in PACKED if format.family is Family.MULAW]

SIZES = (0, 1, 7, 8, 9, 31, 32, 33, 63, 127, 128, 129, 255, 256, 257, 1000, 4095, 4096, 4097)

SHAPES = (
    (64, 128),
    (64, 129),
    (40, 160),
    (3, 4097),
    (128, 32),
    (100, 96),
    (31, 257),
    (5, 1000),
    (8, 3, 16, 16),
    (2, 64, 7, 7),
    (16, 2, 256),
    (1, 8192),
)
"""Shapes that are packed, with full, short and single blocks in a row."""

PLAIN_SHAPES = ((), (0,), (1,), (127,), (5000,), (0, 5), (5, 0), (3, 8), (33, 33), (4096, 1), (300, 31))
"""Shapes whose states stay in fp32."""


def name(value: object) -> str:
    """Readable ids for formats and shapes."""
    if isinstance(value, Format):
        return value.name
    if isinstance(value, tuple):
        return "x".join(map(str, value)) or "scalar"
    return str(value)
