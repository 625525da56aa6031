"""Gives the live states of a parameter other formats, at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from stquant.checkpoint.state_dict import plain_state
from stquant.codecs.blocks import Grid
from stquant.codecs.format import Format
from stquant.distributed import tensors
from stquant.policy.facts import Choice
from stquant.storage.master import PackedResidual
from stquant.storage.packed import PackedState


def refit(name: str, param: Tensor, state: dict[str, Any], choices: Mapping[str, Choice], keep: bool) -> None:
    """Bring the states of a parameter into other formats, rounded to nearest.

    Args:
        name: The parameter's name, for errors.
        param: The parameter.
        state: Its live state, changed in place.
        choices: The format that each state is to have.
        keep: Leave packed states of the right block size as they are, whatever their width.
    """
    for key, choice in choices.items():
        grid = tensors.grid_of(name, param, choice.format.block) if choice.format.packed else None
        state[key] = _refitted(param, state[key], choice.format, grid, keep)
    residual = state.get("residual")
    grids = [value.grid for value in state.values() if isinstance(value, PackedState)]
    if isinstance(residual, PackedResidual) and grids and grids[0] != residual.grid:
        state["residual"] = PackedResidual.pack(residual.bits, grids[0], residual.unpack())


def _refitted(
    param: Tensor, value: Tensor | PackedState, format: Format, grid: Grid | None, keep: bool
) -> Tensor | PackedState:
    if grid is None:
        return value if isinstance(value, Tensor) else plain_state(param).copy_(value.decode())
    if isinstance(value, Tensor):
        return PackedState.encoded(format, value, grid)
    if value.grid == grid:
        return value if keep or value.format == format else value.recode(format)
    return PackedState.encoded(format, value.decode(), grid)
