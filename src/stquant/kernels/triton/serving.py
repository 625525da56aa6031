"""What the kernels serve, and why the reference works on the rest."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence

import torch
import triton
from torch import Tensor

from stquant.codecs.blocks import Box, Grid, Strides
from stquant.codecs.format import Family, Format
from stquant.kernels.ops import Item, Packed, Rule
from stquant.kernels.records import strides
from stquant.kernels.triton import capturing, steps

INTERPRETED: bool = not isinstance(steps.adam, triton.JITFunction)
"""Whether the kernels were loaded under TRITON_INTERPRET=1 and work on CPU tensors, slowly."""

MAX_BLOCK = 1024
MAX_RAGGED_BLOCK = 512
"""Largest block that need not be whole: a larger one takes more registers than there are."""

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
FAMILIES = {Family.DYNAMIC: 2, Family.MULAW: 3, Family.LOG: 4}
_CUT = "the parameter is sharded along several dimensions between the first and the last"


def why_not_served(param: Tensor, formats: Iterable[Format], box: Box | None) -> str | None:
    """Say why steps of a parameter whose states have these formats are the reference's, or None if they are not."""
    for format in formats:
        if format.packed:
            if format.family not in FAMILIES:
                return _of_a_recipe(format)
            grid = Grid.of(tuple(param.shape), format.block, box)
            if format.stochastic and strides_of(grid) is None:
                return _CUT
            reason = _why_not_grid(grid)
            if reason:
                return reason
    return why_not_tensors([param])


def why_not_captured(item: Item, rule: Rule) -> str | None:
    """Say why a step of an item cannot be captured in a graph, or None if it can."""
    if item.counter is None or item.counter.device != item.param.device:
        return "the step count is not on the device of the parameter"
    return capturing.why_not_captured(rule) or why_not(item)


def why_not(item: Item) -> str | None:
    """Say why the reference works on an item of a step, or None if these kernels do."""
    if item.box is not None and strides_of(item.grid) is None and _draws(item):
        return _CUT
    tensors = [item.param, item.grad]
    grid = None
    if item.residual is not None:
        grid = item.residual.grid
        tensors.append(item.residual.codes)
    for name, state in item.states.items():
        if isinstance(state, Tensor):
            if state.dtype is not torch.float32:
                return f"a plain state is {state.dtype}"
            tensors.append(state)
            continue
        if grid is not None and state.grid is not grid and state.grid != grid:
            return "the states have different block grids"
        grid = state.grid
        reason = why_not_packed(state)
        if reason:
            return reason
        if state.format.signed == (name == "exp_avg_sq"):
            return f"{name} in format {state.format.name!r}"
        tensors.append(state.codes)
    if grid is not None and "max_exp_avg_sq" in item.states:
        return "a running maximum next to packed states"
    reason = why_not_tensors(tensors)
    return reason if reason or grid is None else _why_not_grid(grid, tensors_of_its_shape(item))


def why_not_tensors(tensors: Sequence[Tensor]) -> str | None:
    """Say why tensors cannot be worked on together, or None if they can."""
    device = tensors[0].device
    if device.type != ("cpu" if INTERPRETED else "cuda"):
        return f"a tensor is on {device}"
    for tensor in tensors:
        if tensor.device != device:
            return f"tensors are on {device} and {tensor.device}"
        if tensor.dtype not in DTYPES and tensor.dtype is not torch.uint8:
            return f"a tensor is {tensor.dtype}"
        if not tensor.is_contiguous():
            return "a tensor is not contiguous"
    return None


def why_not_packed(state: Packed, plain: Iterable[Tensor] = ()) -> str | None:
    """Say why the reference works on a packed state and tensors of its shape, or None if these kernels do."""
    if state.format.family not in FAMILIES:
        return _of_a_recipe(state.format)
    if not state.scales.is_contiguous():
        return "a state is not contiguous"
    return why_not_tensors([state.codes]) or _why_not_grid(state.grid, plain)


def _of_a_recipe(format: Format) -> str:
    return f"format {format.name!r} is that of a published recipe"


def _why_not_grid(grid: Grid, plain: Iterable[Tensor] = ()) -> str | None:
    if grid.block > MAX_BLOCK:
        return f"blocks of more than {MAX_BLOCK}"
    if grid.block > MAX_RAGGED_BLOCK and not is_whole(grid, plain):
        return f"blocks of more than {MAX_RAGGED_BLOCK} in rows that they do not divide, or off the 16-byte borders"
    return None


def tensors_of_its_shape(item: Item) -> Iterator[Tensor]:
    """Yield the tensors of an item that have the parameter's shape."""
    yield item.param
    yield item.grad
    yield from (state for state in item.states.values() if isinstance(state, Tensor))


def is_whole(grid: Grid, plain: Iterable[Tensor]) -> bool:
    """Whether rows are made of whole blocks, in memory that starts on 16-byte borders."""
    return grid.row % grid.block == 0 and all(tensor.data_ptr() % 16 == 0 for tensor in plain)


def _draws(item: Item) -> bool:
    packed = [state.format for state in item.states.values() if not isinstance(state, Tensor)]
    return item.stochastic or any(format.stochastic for format in packed)


@functools.lru_cache(maxsize=4096)
def strides_of(grid: Grid) -> Strides | None:
    """Where rows lie in the whole parameter, or None if no record can say it."""
    found = strides(grid)
    return Strides(found.origin) if found is not None and grid.rows == 1 else found
