"""Torch's flattened form of an optimizer's state: one level of dotted keys, turned back into groups and states.

`StateDictOptions(flatten_optimizer_state_dict=True)` writes `state.NAME.KEY` and
`param_groups.NAME.KEY` for every parameter. Names have dots, too; which part is the name follows
from the groups, whose keys have none. Parameters whose groups say the same become one group.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_GROUPS, _STATE = "param_groups.", "state."


def is_flattened(found: Any) -> bool:
    """Return whether this is an optimizer's state in the flattened form."""
    return isinstance(found, Mapping) and any(isinstance(key, str) and key.startswith(_GROUPS) for key in found)


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return `state` and `param_groups` of a flattened state; parameters have their names as keys."""
    options: dict[str, dict[str, Any]] = {}
    for key, value in flat.items():
        if key.startswith(_GROUPS):
            name, _, option = key.removeprefix(_GROUPS).rpartition(".")
            options.setdefault(name, {})[option] = value
    groups: list[dict[str, Any]] = []
    for name, values in options.items():
        group = next((group for group in groups if {**group, "params": None} == {**values, "params": None}), None)
        if group is None:
            groups.append({**values, "params": [name]})
        else:
            group["params"].append(name)
    return {"state": _states(flat, options.keys()), "param_groups": groups}


def _states(flat: Mapping[str, Any], names: Any) -> dict[str, Any]:
    states: dict[str, Any] = {}
    for key, value in flat.items():
        if not key.startswith(_STATE):
            continue
        name, path = _split(key.removeprefix(_STATE), names)
        place = states.setdefault(name, {})
        for part in path[:-1]:
            place = place.setdefault(part, {})
        place[path[-1]] = value
    return states


def _split(key: str, names: Any) -> tuple[str, list[str]]:
    """Return the parameter of a key, the longest name that it begins with, and the keys behind it."""
    end = len(key)
    while (end := key.rfind(".", 0, end)) > 0:
        if key[:end] in names:
            return key[:end], key[end + 1 :].split(".")
    name, _, last = key.rpartition(".")
    return name, [last]
