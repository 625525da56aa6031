"""Adam checkpoints from other libraries to ours, and to plain torch.

Works on state dicts alone: shapes come from the states, no model is built. What is read is what
`torch.optim`, bitsandbytes, torchao or this library wrote; what is written is what this library or
`torch.optim` loads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stquant.checkpoint import foreign
from stquant.checkpoint.foreign import Borrowed
from stquant.checkpoint.restore import HOW, number_noise
from stquant.checkpoint.schema import GROUP_KEY, GroupConfig
from stquant.checkpoint.state_dict import absorb, export, present
from stquant.errors import CheckpointError
from stquant.policy.budget import is_adaptive
from stquant.policy.facts import ParameterFacts
from stquant.policy.policies import Policy, parse
from stquant.storage.master import check_master_bits

_STATES = {"exp_avg": True, "exp_avg_sq": False}
_WITH_MAXIMUM = {**_STATES, "max_exp_avg_sq": False}
_BNB_ONLY = ("alpha", "t_alpha", "t_beta3")

Shapes = Mapping[str, Sequence[int]]

Progress = Callable[[int, int], None]
"""Told after each parameter how many are done, and of how many."""


class _Entry(NamedTuple):
    index: Any
    name: str
    group: Mapping[str, Any]
    state: Mapping[str, Any]
    shape: tuple[int, ...]


def kind_of(saved: Mapping[str, Any]) -> str:
    """Return who wrote a state dict: "stquant", "bitsandbytes", "torchao" or "torch".

    Raises:
        CheckpointError: It is not the state dict of an optimizer.
    """
    try:
        groups, states = saved["param_groups"], saved["state"]
        if any(GROUP_KEY in group for group in groups):
            return "stquant"
        return foreign.kind_of(states)
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            "this is not the state dict of an optimizer: it needs 'state' and 'param_groups'; "
            "choose the entry that holds one"
        ) from error


def to_stquant(
    saved: Mapping[str, Any],
    policy: Policy | str,
    *,
    master_bits: int | str | None = "auto",
    seed: int = 0,
    shapes: Shapes | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Convert a state dict of torch, bitsandbytes or torchao to one that `AdamW` and `Adam` load.

    States are encoded in the policy's formats, rounded to nearest. Where a format and its blocks
    are those of the file ("bnb8", "torchao4", with rows of whole blocks), codes and scales carry
    over as they are.

    Args:
        saved: The state dict; not changed.
        policy: Chooses the formats.
        master_bits: Bits of the residuals that bf16 parameters get when the result is loaded.
        seed: Seed of stochastic rounding.
        shapes: Shapes of the model's parameters by name, in their order: names for errors, and a
            check. None takes names from the file, or numbers.
        progress: Told of each parameter; optional.

    Raises:
        CheckpointError: The file does not convert; names the parameter.
    """
    if kind_of(saved) == "stquant":
        raise CheckpointError("the file is one of stquant already; load it, or convert it to torch")
    wanted = parse(policy)
    if is_adaptive(wanted):
        raise ValueError(
            f"policy={wanted!r} decides while training; convert to fixed formats such as 2+0, or let an optimizer "
            "with this policy load the file itself"
        )
    config = GroupConfig(wanted, check_master_bits(master_bits), seed)
    entries = list(_entries(saved, shapes))
    live = [_absorb(entry, config.policy) for entry in _told(entries, progress)]
    number_noise(live)
    states = {entry.index: present(state, _parameter(entry)) for entry, state in zip(entries, live, strict=True)}
    groups = [{**_plain_group(group), GROUP_KEY: config.dump()} for group in saved["param_groups"]]
    return {"state": states, "param_groups": groups}


def to_torch(
    saved: Mapping[str, Any], *, shapes: Shapes | None = None, progress: Progress | None = None
) -> dict[str, Any]:
    """Convert a state dict of this library, bitsandbytes or torchao to one that torch's AdamW loads.

    States are decoded to fp32. Residuals of bf16 weights are not part of the result: they belong
    to the weights.

    Args:
        saved: The state dict; not changed.
        shapes: As in `to_stquant`.
        progress: As in `to_stquant`.

    Raises:
        CheckpointError: The file does not convert; names the parameter.
    """
    ours = kind_of(saved) == "stquant"
    states = {}
    for entry in _told(list(_entries(saved, shapes)), progress):
        if ours:
            state = absorb(entry.name, _parameter(entry), entry.state, _expected(entry), None)
        else:
            state = _absorb(entry, parse("fp32"))
        states[entry.index] = export(state, _parameter(entry))
    return {"state": states, "param_groups": [_plain_group(group) for group in saved["param_groups"]]}


def shapes_of(model: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model checkpoint's floating tensors by name; a tied one counts once.

    Raises:
        CheckpointError: It is not the state dict of a model.
    """
    shapes, seen = {}, set()
    for name, value in model.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(f"the model checkpoint holds {name!r} of {type(value).__name__}, expected tensors")
        place = (value.untyped_storage().data_ptr(), value.storage_offset(), tuple(value.shape))
        if value.is_floating_point() and (place not in seen or not value.numel()):
            seen.add(place)
            shapes[name] = tuple(value.shape)
    return shapes


def save(state_dict: Mapping[str, Any], path: Path) -> None:
    """Write a file completely or not at all.

    Raises:
        CheckpointError: It exists already.
    """
    if path.exists():
        raise CheckpointError(f"{path} exists already; choose another name or remove it")
    partial = path.with_name(path.name + ".partial")
    try:
        torch.save(dict(state_dict), partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _entries(saved: Mapping[str, Any], shapes: Shapes | None) -> Iterator[_Entry]:
    """Yield the parameters that have a state, named and with their shapes."""
    groups, states = saved["param_groups"], saved["state"]
    order = [(index, group) for group in groups for index in group["params"]]
    if unknown := states.keys() - {index for index, _ in order}:
        raise CheckpointError(f"the file has states {sorted(map(str, unknown))} of no parameter")
    for (index, group), name in zip(order, _names(groups, len(order), shapes), strict=True):
        if state := states.get(index):
            state = state if GROUP_KEY in group else foreign.adam_state(name, state)
            yield _Entry(index, name, group, state, _shape(name, state, shapes))


def _told(entries: Sequence[_Entry], progress: Progress | None) -> Iterator[_Entry]:
    """Yield parameters, and tell of each when it is done."""
    for done, entry in enumerate(entries, start=1):
        yield entry
        if progress is not None:
            progress(done, len(entries))


def _names(groups: Sequence[Mapping[str, Any]], count: int, shapes: Shapes | None) -> list[str]:
    if all("param_names" in group for group in groups):
        return [name for group in groups for name in group["param_names"]]
    if shapes is None:
        return [f"group {i} / {j}" for i, group in enumerate(groups) for j in range(len(group["params"]))]
    if len(shapes) != count:
        raise CheckpointError(
            f"the model checkpoint has {len(shapes)} floating tensors, the optimizer {count} parameters and no names; "
            "convert without the model, or leave out buffers and parameters that are not trained"
        )
    return list(shapes)


def _shape(name: str, state: Mapping[str, Any], shapes: Shapes | None) -> tuple[int, ...]:
    missing = sorted(_STATES.keys() - state.keys())
    if missing:
        raise CheckpointError(
            f"parameter {name!r} has no {' and no '.join(missing)}, but {', '.join(sorted(state))}; "
            "only states of Adam and AdamW convert"
        )
    value = state["exp_avg"]
    if isinstance(value, Mapping) and "packed" in value:
        shape = tuple(value.get("shape", ()))
    else:
        found = value["codes"] if isinstance(value, Mapping) else getattr(value, "codes", value)
        if not isinstance(found, Tensor):
            raise CheckpointError(f"parameter {name!r}: exp_avg is {type(found).__name__}, expected a tensor")
        shape = tuple(found.shape)
    if shapes is not None and tuple(shapes.get(name, ())) != shape:
        expected = tuple(shapes[name]) if name in shapes else "no such parameter"
        raise CheckpointError(f"parameter {name!r} has states of shape {shape}, the model checkpoint has {expected}")
    return shape


def _absorb(entry: _Entry, policy: Policy) -> dict[str, Any]:
    """Return the live state of a parameter that another library wrote."""
    expected, param = _expected(entry), _parameter(entry)
    choices = policy.choose(ParameterFacts(entry.shape, param.dtype), expected)
    if "max_exp_avg_sq" in expected and any(choice.format.packed for choice in choices.values()):
        raise CheckpointError(f"parameter {entry.name!r} has the maximum of amsgrad, which needs policy 'fp32'")
    state = dict(entry.state)
    for key in expected.keys() & state.keys():
        if isinstance(value := state[key], Borrowed):
            carried = value.present(choices[key].format) if choices[key].format.packed else None
            state[key] = value.decode() if carried is None else carried
    return absorb(entry.name, param, state, expected, choices)


def _expected(entry: _Entry) -> Mapping[str, bool]:
    return _WITH_MAXIMUM if "max_exp_avg_sq" in entry.state else _STATES


def _parameter(entry: _Entry) -> Tensor:
    """Return a parameter of the right shape and dtype that takes no memory."""
    value = entry.state["exp_avg"]
    dtype = torch.bfloat16 if "residual" in entry.state else torch.float32
    if isinstance(value, Tensor) and value.dtype is torch.float64:
        dtype = torch.float64
    return torch.empty((), dtype=dtype).expand(entry.shape)


def _plain_group(group: Mapping[str, Any]) -> dict[str, Any]:
    if group.get("alpha") or len(group.get("betas", (0, 0))) != 2:
        raise CheckpointError("the file is one of AdEMAMix (alpha, three betas); only Adam and AdamW convert")
    kept = {key: value for key, value in group.items() if key not in (*HOW, *_BNB_ONLY, GROUP_KEY)}
    if isinstance(kept.get("lr"), Tensor):
        kept["lr"] = float(kept["lr"])
    return kept
