"""The named formats, one literal each.

A number, once released, keeps its meaning for ever: checkpoints hold it. A name says family and
bits; a suffix names the choice that differs from the default of that width. From 40 on
stand the formats of published recipes, with the block sizes of those.
"""

from __future__ import annotations

from stquant.codecs.format import Family, Format, Rounding
from stquant.errors import FormatError, did_you_mean

_NEAREST, _STOCHASTIC = Rounding.NEAREST, Rounding.STOCHASTIC

FLOAT32 = Format(0, "fp32", Family.FLOAT32, 32)

_FORMATS = (
    FLOAT32,
    Format(1, "dynamic0", Family.DYNAMIC, 0, prepay=True),
    Format(2, "dynamic2", Family.DYNAMIC, 2, prepay=True),
    Format(3, "dynamic3", Family.DYNAMIC, 3, prepay=True),
    Format(4, "mulaw4", Family.MULAW, 4),
    Format(5, "mulaw5", Family.MULAW, 5),
    Format(6, "mulaw6", Family.MULAW, 6),
    Format(8, "mulaw8", Family.MULAW, 8),
    Format(12, "dynamic2-plain", Family.DYNAMIC, 2),
    Format(13, "dynamic3-plain", Family.DYNAMIC, 3),
    Format(14, "mulaw4-prepay", Family.MULAW, 4, prepay=True),
    Format(15, "mulaw5-prepay", Family.MULAW, 5, prepay=True),
    Format(16, "mulaw6-prepay", Family.MULAW, 6, prepay=True),
    Format(18, "mulaw8-prepay", Family.MULAW, 8, prepay=True),
    Format(20, "log0", Family.LOG, 0),
    Format(21, "log1", Family.LOG, 1, _STOCHASTIC),
    Format(22, "log2", Family.LOG, 2, _STOCHASTIC),
    Format(23, "log3", Family.LOG, 3, _STOCHASTIC),
    Format(24, "log4", Family.LOG, 4, _STOCHASTIC),
    Format(25, "log5", Family.LOG, 5),
    Format(26, "log6", Family.LOG, 6),
    Format(28, "log8", Family.LOG, 8),
    Format(31, "log1-nearest", Family.LOG, 1, _NEAREST),
    Format(32, "log2-nearest", Family.LOG, 2, _NEAREST),
    Format(33, "log3-nearest", Family.LOG, 3, _NEAREST),
    Format(34, "log4-nearest", Family.LOG, 4, _NEAREST),
    Format(35, "log5-stochastic", Family.LOG, 5, _STOCHASTIC),
    Format(36, "log6-stochastic", Family.LOG, 6, _STOCHASTIC),
    Format(38, "log8-stochastic", Family.LOG, 8, _STOCHASTIC),
    Format(40, "dynamic8", Family.TREE, 8, block=256),
    Format(41, "udynamic8", Family.UNSIGNED_TREE, 8, block=256),
    Format(42, "dynamic4", Family.TREE, 4),
    Format(43, "linear4", Family.LINEAR, 4),
    Format(44, "nf4", Family.NORMAL, 4),
    Format(45, "softsign8", Family.SOFTSIGN, 8, block=32),
    Format(46, "sqrt8", Family.ROOT, 8, block=32),
    Format(47, "solo2", Family.GEOMETRIC, 2, _STOCHASTIC),
)

_BY_NAME = {entry.name: entry for entry in _FORMATS}
_BY_NUMBER = {entry.number: entry for entry in _FORMATS}


def formats() -> tuple[Format, ...]:
    """Return every format of the catalogue, in the order of their numbers."""
    return _FORMATS


def get(name: str, block: int | None = None) -> Format:
    """Return the format called `name`, with another block size if `block` is given.

    Raises:
        FormatError: There is no such format, or no such block size.
    """
    if name not in _BY_NAME:
        hint = did_you_mean(name, _BY_NAME)
        raise FormatError(f"format {name!r} is unknown; the catalogue has {', '.join(_BY_NAME)}{hint}")
    found = _BY_NAME[name]
    return found if block is None else found.with_block(block)


def from_number(number: int, block: int | None = None) -> Format:
    """Return the format with a catalogue number, with another block size if `block` is given.

    Raises:
        FormatError: There is no such number, or no such block size.
    """
    if number not in _BY_NUMBER:
        raise FormatError(f"format number {number} is unknown; this version knows {', '.join(map(str, _BY_NUMBER))}")
    found = _BY_NUMBER[number]
    return found if block is None else found.with_block(block)


def default_for(bits: int, signed: bool) -> Format:
    """Return the default format of a width, for a signed or a non-negative state.

    Raises:
        FormatError: No format of that kind has this width.
    """
    families = {Family.LOG} if not signed else {Family.DYNAMIC, Family.MULAW}
    choices = {f.bits: f for f in reversed(_FORMATS) if f.family in families} | {32: FLOAT32}
    if bits not in choices:
        kind = "signed" if signed else "non-negative"
        raise FormatError(f"bits={bits} is not available for a {kind} state; use one of {sorted(choices)}")
    return choices[bits]
