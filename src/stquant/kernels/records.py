"""The table that the compiled kernels for CPUs work through: a record of numbers and addresses for each parameter.

The layout is that of `csrc/layout.h`. A record is a head that stays the same from step to step as
long as its `facts` do, and a tail that holds what a step changes. This file only writes bytes; what
may become a record is said in `cpu`.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from stquant.codecs.blocks import Grid, Strides
from stquant.codecs.curves import default_octaves
from stquant.codecs.format import Family, Format, Octaves
from stquant.codecs.rounding import Stream, parameter_key
from stquant.kernels.ops import Item, Packed, Rule, State
from stquant.kernels.reference.sample import sampled

_HEAD = struct.Struct("=7q Q q Q q Q q q Q q" + "Q Q q q q q q q Q" * 3)
_TAIL = struct.Struct("=q 9d")
"""The fields of `Item` in `csrc/layout.h`, up to `maximize` and the states, and from `step` on."""

_STATE = struct.Struct("=Q Q q q q q q q Q")
_SAMPLED = struct.Struct("=6q")
"""The fields of `State` and `Sampled`."""

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_FAMILIES = {Family.DYNAMIC: 2, Family.MULAW: 3, Family.LOG: 4}
_ABSENT = (0,) * 9
_NO_STEP = _TAIL.pack(0, *(0.0,) * 9)


def facts(item: Item, rule: Rule) -> list[object]:
    """Return all that the head of an item's record depends on, and whether there can be one."""
    param, grad, residual = item.param, item.grad, item.residual
    found: list[object] = [
        rule.seed,
        rule.maximize,
        item.stochastic,
        item.noise_id,
        item.box,
        param.data_ptr(),
        param.dtype,
        param.shape,
        param.is_contiguous(),
        param.is_cpu,
        grad.data_ptr(),
        grad.dtype,
        grad.is_contiguous(),
        grad.is_cpu,
    ]
    if residual is not None:
        found += (residual.bits, residual.grid, residual.codes.data_ptr())
    for name, state in item.states.items():
        if isinstance(state, Tensor):
            found += (name, state.data_ptr(), state.dtype, state.is_contiguous(), state.is_cpu)
        else:
            codes, scales = state.codes, state.scales
            found += (name, state.format, state.octaves, state.grid, codes.data_ptr(), codes.is_contiguous())
            found += (codes.is_cpu, scales.data_ptr(), scales.is_contiguous())
    return found


def head(item: Item, names: Sequence[str], rule: Rule) -> bytes:
    """Return the head of the record of an item whose rule has states of these names."""
    residual = item.residual
    states: list[int] = []
    for name in names:
        states += _state_fields(item, name, rule.seed)
    return _HEAD.pack(
        *_grid_fields(item.grid),
        item.param.data_ptr(),
        _DTYPES[item.param.dtype],
        item.grad.data_ptr(),
        _DTYPES[item.grad.dtype],
        0 if residual is None else residual.codes.data_ptr(),
        0 if residual is None else residual.bits,
        item.stochastic,
        parameter_key(rule.seed, item.noise_id, Stream.WEIGHT) if item.stochastic else 0,
        rule.maximize,
        *states,
        *_ABSENT * (3 - len(names)),
    )


def tail(step: int, constants: Sequence[float]) -> bytes:
    """Return the tail of the records of a step: nine constants, fp32 values and flags."""
    return _TAIL.pack(step, *constants)


def transfer(states: Sequence[Packed], tensor: Tensor | None = None) -> bytes:
    """Return the record of a transfer: one or two states, and a plain tensor."""
    fields = [_packed_fields(state, 0) for state in states] + [_ABSENT] * (3 - len(states))
    return (
        _HEAD.pack(
            *_grid_fields(states[0].grid),
            0 if tensor is None else tensor.data_ptr(),
            0 if tensor is None else _DTYPES[tensor.dtype],
            *(0,) * 7,
            *(number for state in fields for number in state),
        )
        + _NO_STEP
    )


def candidate(format: Format) -> bytes:
    """Return the record of a format that a state could have, at its default octaves."""
    return _STATE.pack(0, 0, *_format_fields(format, default_octaves(format)), 0)


def samples(items: Sequence[Item]) -> Iterator[bytes]:
    """Yield the records of what is measured of items."""
    for number, item in enumerate(items):
        if item.param.numel():
            for piece in sampled(item):
                rows, blocks = piece.rows, piece.blocks
                yield _SAMPLED.pack(number, rows.start, rows.stop, rows.step or 1, blocks.start, blocks.stop)


@functools.lru_cache(maxsize=4096)
def strides(grid: Grid) -> Strides | None:
    """Return how the rows of a grid lie in the whole parameter, or None if no record can say it."""
    return grid.strides()


def _state_fields(item: Item, name: str, seed: int) -> tuple[int, ...]:
    state: State | None = item.states.get(name)
    if state is None:
        return _ABSENT
    if isinstance(state, Tensor):
        return (state.data_ptr(), 0, 1, 0, 0, 0, 0, 0, 0)
    # What is measured rounds to formats that draw, also where the present one does not.
    drawn = not state.format.signed
    return _packed_fields(state, parameter_key(seed, item.noise_id, Stream.EXP_AVG_SQ) if drawn else 0)


def _packed_fields(state: Packed, key: int) -> tuple[int, ...]:
    return (
        state.codes.data_ptr(),
        state.scales.data_ptr(),
        *_format_fields(state.format, state.octaves),
        key,
    )


@functools.lru_cache(maxsize=256)
def _format_fields(format: Format, octaves: Octaves) -> tuple[int, ...]:
    return (_FAMILIES[format.family], format.bits, format.stochastic, format.prepay, *octaves)


@functools.lru_cache(maxsize=4096)
def _grid_fields(grid: Grid) -> tuple[int, ...]:
    found = strides(grid) or Strides(0)  # only a step asks for them, and `why_not` has looked
    return grid.rows, grid.row, grid.block, found.origin, found.run, found.jump, found.pitch
