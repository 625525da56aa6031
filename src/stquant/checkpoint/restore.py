"""A whole state dict to groups and states of a running optimizer, or an error and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

from torch import Tensor

from stquant.checkpoint.schema import GROUP_KEY
from stquant.errors import CheckpointError


class Named(NamedTuple):
    """A parameter with its name and its group."""

    name: str
    param: Tensor
    group: dict[str, Any]


HOW = ("foreach", "fused", "capturable", "differentiable")
"""Keys of a group that say how a step is computed, not what; those of a file stay behind."""

Absorb = Callable[[Named, Mapping[str, Any], bool], dict[str, Any]]
"""Builds one parameter's live state; the last argument says whether a plain optimizer wrote it."""


def named(groups: Sequence[dict[str, Any]]) -> Iterator[Named]:
    """Yield the parameters of groups, named as the user did or by their place."""
    for position, group in enumerate(groups):
        names = group.get("param_names") or [f"group {position} / {i}" for i in range(len(group["params"]))]
        for name, param in zip(names, group["params"], strict=True):
            yield Named(name, param, group)


def merge_groups(saved: Sequence[Mapping[str, Any]], own: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the saved groups with the running optimizer's parameters in them.

    Keys that the file lacks keep their running values, and so does how steps are computed.

    Raises:
        CheckpointError: The groups differ in number or size.
    """
    found, expected = ([len(group["params"]) for group in groups] for groups in (saved, own))
    if found != expected:
        raise CheckpointError(
            f"the file has groups of {found} parameters, this optimizer of {expected}; nothing was loaded"
        )
    merged = []
    for running, new in zip(own, saved, strict=True):
        group = {key: deepcopy(value) for key, value in new.items() if key not in ("params", *HOW)}
        merged.append({**running, **group, "params": running["params"]})
    return merged


def build_states(
    state_dict: Mapping[str, Any], groups: Sequence[dict[str, Any]], absorb: Absorb
) -> dict[Tensor, dict[str, Any]]:
    """Return a live state for every parameter that has one in the file.

    Args:
        state_dict: The file: `state` and `param_groups`.
        groups: What `merge_groups` made of the file's groups.
        absorb: Builds the live state of one parameter.

    Raises:
        CheckpointError: A state is malformed, or belongs to no parameter.
    """
    saved_groups = state_dict["param_groups"]
    left = dict(state_dict["state"])
    order = [(index, GROUP_KEY not in group) for group in saved_groups for index in group["params"]]
    states = {}
    for (index, plain), entry in zip(order, named(groups), strict=True):
        found = left.pop(index, None)
        if plain and found is not None and all(value is None for value in found.values()):
            found = None  # torch's SGD without momentum writes a buffer of None
        if found is not None:
            states[entry.param] = absorb(entry, found, plain)
    if left:
        raise CheckpointError(f"the file has states {sorted(map(str, left))} of no parameter; nothing was loaded")
    number_noise(states.values())
    return states


def number_noise(states: Any) -> None:
    """Give a noise id to states that a plain optimizer wrote and that so have none."""
    next_id = next_noise_id(states)
    for state in states:
        if "noise_id" not in state:
            state["noise_id"] = next_id
            next_id += 1


def next_noise_id(states: Any) -> int:
    """Return the lowest noise id above all that are taken."""
    return 1 + max((state.get("noise_id", -1) for state in states), default=-1)
