"""What the checkpoint of an optimizer holds: who wrote it, formats, bytes, steps, and what is wrong.

Bytes are those that the states take in a running optimizer, not those of the file, where ours has
a byte for each code. Data is checked where it was read, as on loading; meta tensors are only counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stquant.checkpoint import foreign
from stquant.checkpoint.convert import kind_of
from stquant.checkpoint.foreign import Borrowed
from stquant.checkpoint.restore import Named, named
from stquant.checkpoint.schema import CONTROL, GROUP_KEY, read_group
from stquant.checkpoint.state_dict import absorb
from stquant.codecs import catalog
from stquant.codecs.blocks import Grid
from stquant.errors import CheckpointError, FormatError
from stquant.policy.facts import ParameterFacts
from stquant.report.ledger import Ledger, Row, rows_of
from stquant.storage.master import PackedResidual
from stquant.storage.packed import PackedState


@dataclass(frozen=True, slots=True)
class Inspection:
    """What was found.

    Attributes:
        kind: Who wrote it: "stquant", "torch", "bitsandbytes" or "torchao".
        groups: For each group its numbers: parameters, learning rate, and for ours policy, bits
            of residuals and seed.
        steps: Lowest and highest step count; None if there is none.
        stateless: Parameters without a state.
        ledger: One row for each state.
        findings: What would keep it from being loaded; empty if nothing would.
    """

    kind: str
    groups: Sequence[dict[str, Any]]
    steps: tuple[int, int] | None
    stateless: int
    ledger: Ledger
    findings: Sequence[str]

    def kinds(self) -> Iterator[dict[str, Any]]:
        """Yield totals by state and format, in the order of their first row."""
        together: dict[tuple[str, str], list[Row]] = {}
        for row in self.ledger.rows:
            together.setdefault((row.state, row.format), []).append(row)
        for (state, format), rows in together.items():
            elements, size = sum(row.elements for row in rows), sum(row.bytes for row in rows)
            bits = 8 * size / elements if elements else 0.0
            yield {
                "state": state,
                "format": format,
                "tensors": len(rows),
                "elements": elements,
                "bits": bits,
                "bytes": size,
            }

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain numbers, strings, lists and dicts."""
        return {
            "kind": self.kind,
            "groups": list(self.groups),
            "steps": None if self.steps is None else list(self.steps),
            "stateless": self.stateless,
            "kinds": list(self.kinds()),
            "findings": list(self.findings),
            **self.ledger.to_dict(),
        }


def inspect(saved: Mapping[str, Any]) -> Inspection:
    """Return what the state dict of an optimizer holds.

    Args:
        saved: `state` and `param_groups`, as ours, torch's, bitsandbytes' or torchao's optimizers
            write them; tensors may be on the meta device.

    Raises:
        CheckpointError: It is not the state dict of an optimizer.
    """
    kind = kind_of(saved)
    left = dict(saved["state"])
    rows: list[Row] = []
    findings: list[str] = []
    steps: list[int] = []
    stateless = 0
    for entry in named(saved["param_groups"]):
        state = left.pop(entry.param, None)
        if not state:
            stateless += 1
            continue
        try:
            rows += _ours(entry, state) if kind == "stquant" else _foreign(entry.name, state)
            steps += [int(state["step"])] if "step" in state else []
        except (CheckpointError, FormatError) as error:
            findings.append(str(error).removesuffix("; nothing was loaded"))
    if left:
        findings.append(f"states {sorted(map(str, left))} belong to no parameter")
    groups = [_group(group, kind) for group in saved["param_groups"]]
    span = (min(steps), max(steps)) if steps else None
    return Inspection(kind, groups, span, stateless, Ledger(rows), findings)


def _ours(entry: Named, state: Mapping[str, Any]) -> Iterator[Row]:
    names = state.keys() - {"step", "noise_id", "residual", CONTROL}
    states = {name: not name.endswith("exp_avg_sq") for name in state if name in names}
    shapes = {shape for name in states if (shape := _shape(state[name])) is not None}
    if len(shapes) != 1:
        raise CheckpointError(f"parameter {entry.name!r}: states have shapes {sorted(shapes)}, expected one")
    # The parameter itself is not in the file; a stand-in without memory has its shape.
    dtype = torch.bfloat16 if "residual" in state else torch.float32
    param = torch.empty((), dtype=dtype).expand(shapes.pop())
    if not any(tensor.is_meta for tensor in _tensors(state)):
        absorb(entry.name, param, state, states, None)
    live = {name: _live(value) for name, value in state.items()}
    choices = read_group(entry.group[GROUP_KEY]).policy.choose(ParameterFacts(tuple(param.shape), dtype), states)
    return rows_of(entry.name, param, live, {name: choice.reason for name, choice in choices.items()})


def _live(value: Any) -> Any:
    """Return a saved state in the form that it has in a running optimizer, without its data."""
    shape = _shape(value)
    if not isinstance(value, Mapping) or shape is None:
        return value
    if "format" in value:
        format = catalog.from_number(value["format"], value["block"])
        return PackedState.zeros(format, Grid.of(shape, format.block), "meta")
    return PackedResidual.zeros(value["bits"], Grid.of(shape, value["block"]), "meta")


def _shape(value: Any) -> tuple[int, ...] | None:
    """Return the shape of the parameter that a saved state or residual belongs to; None if it does not say."""
    if not isinstance(value, Mapping):
        return tuple(value.shape) if isinstance(value, Tensor) else None
    if "packed" in value:
        shape = value.get("shape")
        return tuple(shape) if isinstance(shape, list | tuple) else None
    shape = _shape(value.get("codes", value.get("values")))
    return shape[:-1] if shape and "bits" in value else shape  # a residual has two bytes for each element


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _tensors(part)


def _foreign(name: str, state: Mapping[str, Any]) -> Iterator[Row]:
    """Yield the rows of another library's state; its tables, which all states share, do not count."""
    is_packed = foreign.kind_of({name: state}) != "torch"
    for key, value in (foreign.adam_state(name, state) if is_packed else state).items():
        if isinstance(value, Borrowed):
            bits = (len(value.table) - 1).bit_length()
            size = value.codes.numel() * bits // 8 + value.scale.numel() * value.scale.element_size()
            format = f"{bits} bits, block {value.block}"
            yield Row(name, key, tuple(value.codes.shape), value.codes.numel(), format, size)
        elif isinstance(value, Tensor):
            yield from rows_of(name, value, {key: value}, {key: "-"})


def _group(group: Mapping[str, Any], kind: str) -> dict[str, Any]:
    lr = group.get("lr")
    found = {"parameters": len(group["params"]), "lr": float(lr) if lr is not None else None}
    if kind != "stquant":
        return found
    config = read_group(group[GROUP_KEY])
    return {**found, "policy": repr(config.policy), "master_bits": config.master_bits, "seed": config.seed}
