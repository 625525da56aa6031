"""The compiled kernels for CPUs: one native call per step, whatever the list holds.

Each parameter becomes one record of numbers and addresses (`records`), of which all but the end is
kept from step to step while what it depends on stays; the module works through the records without
the interpreter lock, on as many threads as torch uses. What it does not serve goes to the
reference, item by item; `why_not` says what that is.

This is the only importer of the compiled module. If that is missing, importing this file works,
`REASON` says why there is none, and no operation may be called.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stquant.codecs.format import Family, Format
from stquant.kernels import records, reference
from stquant.kernels.corrections import AdamConstants, LionConstants, SGDConstants
from stquant.kernels.ops import AdamRule, Candidates, Item, LionRule, Packed, Rule, SGDRule
from stquant.kernels.reference.measurement import BINS, names
from stquant.kernels.reference.stats import StateStats

try:
    import stquant._cpu as _cpu
except ImportError as error:
    REASON: str | None = f"the compiled module is missing ({error}); install with a C++17 compiler: pip install ."
else:
    REASON = None

_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
_FAMILIES = frozenset({Family.DYNAMIC, Family.MULAW, Family.LOG})

SERVES = (
    "fp32, bf16 and fp16 parameters and gradients, contiguous; "
    "states of the families dynamic, mulaw and log in blocks of 32 to 1024"
)
"""What the compiled kernels take; the rest is worked on by the reference."""


def why_not_available() -> str | None:
    """Say why the compiled kernels cannot be used, or None if they can."""
    if REASON is not None:
        return REASON
    try:
        _cpu.active()
    except ValueError as error:
        return f"STQUANT_CPU_ISA: {error}"
    return None


def instruction_sets() -> list[str]:
    """Return the instruction sets that this machine has, the best one first."""
    return _cpu.available()


def instruction_set() -> str:
    """Return the instruction set in use; `STQUANT_CPU_ISA` forces one.

    Raises:
        ValueError: The environment names one that is not available.
    """
    return _cpu.active()


def use(name: str) -> None:
    """Use the instruction set `name` from now on; "" is the best of this machine."""
    _cpu.use(name)


def adam_step_(items: Sequence[Item], rule: AdamRule) -> None:
    """Take one AdamW or Adam step on a list of parameters; see `reference.adam_step_`."""
    _step_(_ADAM, items, rule)


def sgd_step_(items: Sequence[Item], rule: SGDRule) -> None:
    """Take one SGD step on a list of parameters; see `reference.sgd_step_`."""
    _step_(_SGD, items, rule)


def lion_step_(items: Sequence[Item], rule: LionRule) -> None:
    """Take one Lion step on a list of parameters; see `reference.lion_step_`."""
    _step_(_LION, items, rule)


def decode(state: Packed, out: Tensor) -> Tensor:
    """Decode a packed state; see `reference.decode`."""
    if _why_not_tensors([out]) or _why_not_packed(state):
        return reference.decode(state, out)
    if out.numel():
        _cpu.decode(records.transfer([state], out), torch.get_num_threads())
    return out


def encode_(state: Packed, values: Tensor) -> None:
    """Overwrite a packed state with plain values; see `reference.encode_`."""
    if _why_not_tensors([values]) or _why_not_packed(state):
        reference.encode_(state, values)
    elif values.numel():
        _cpu.encode(records.transfer([state], values), torch.get_num_threads())


def recode_(source: Packed, target: Packed) -> None:
    """Overwrite `target` with the values of `source`; see `reference.recode_`."""
    if source.grid != target.grid or _why_not_packed(source) or _why_not_packed(target):
        reference.recode_(source, target)
    elif source.scales.numel():
        _cpu.recode(records.transfer([source, target]), torch.get_num_threads())


def state_stats(state: Packed) -> StateStats:
    """Measure a packed state; see `reference.state_stats`."""
    if _why_not_packed(state) or not state.scales.numel():
        return reference.state_stats(state)
    sums = _cpu.stats(records.transfer([state]), torch.get_num_threads())
    return StateStats(sums[0], sums[1], sums[2], sums[3], sums[4], sums[5], tuple(sums[6:]))


def measure(items: Sequence[Item], rule: Rule, candidates: Candidates) -> Tensor:
    """Measure parameters before they take a step; see `reference.measure`."""
    step, ladders = _STEPS[type(rule)], list(candidates.values())
    found = torch.zeros(len(items), len(names(candidates)), BINS, dtype=torch.int64)
    served = []
    for position, item in enumerate(items):
        if why_not_measured(item, candidates) is None:
            served.append(position)
        else:
            found[position] = reference.measure([item], rule, candidates)[0]
    parts = [items[position] for position in served]
    native = torch.zeros(len(parts), *found.shape[1:], dtype=torch.int64)
    _cpu.measure(
        step.number,
        b"".join(records.head(item, step.states, rule) + _tail(item, step, rule) for item in parts),
        [len(ladder) for ladder in ladders],
        b"".join(records.candidate(format) for ladder in ladders for format in ladder),
        b"".join(records.samples(parts)),
        native.data_ptr(),
        native.numel(),
        torch.get_num_threads(),
    )
    found[served] = native
    return found


def why_not_measured(item: Item, candidates: Candidates) -> str | None:
    """Say why the reference measures an item, or None if the compiled kernels do."""
    for formats in candidates.values():
        for format in formats:
            reason = _why_not_format(format)
            if reason:
                return reason
    if list(item.states) != list(candidates):
        return "not all states are measured"
    return why_not(item)


def why_not_served(param: Tensor, formats: Iterable[Format]) -> str | None:
    """Say why steps of a parameter whose states have these formats are the reference's, or None if they are not."""
    for format in formats:
        reason = _why_not_format(format)
        if reason:
            return reason
    return _why_not_tensors([param])


def why_not(item: Item) -> str | None:
    """Say why the reference works on an item of a step, or None if the compiled kernels do."""
    tensors = [item.param, item.grad]
    grid = None if item.residual is None else item.residual.grid
    for state in item.states.values():
        if isinstance(state, Tensor):
            if state.dtype is not torch.float32:
                return f"a plain state is {state.dtype}"
            tensors.append(state)
            continue
        if grid is not None and state.grid is not grid and state.grid != grid:
            return "the states have different block grids"
        grid = state.grid
        reason = _why_not_packed(state)
        if reason:
            return reason
    if grid is not None and "max_exp_avg_sq" in item.states:
        return "a running maximum next to packed states"
    if grid is not None and grid.block > _cpu.MAX_BLOCK:
        return f"blocks of more than {_cpu.MAX_BLOCK}"
    if item.box is not None and records.strides(item.grid) is None:
        return "the parameter is sharded along several dimensions between the first and the last"
    return _why_not_tensors(tensors)


def _why_not_tensors(tensors: Iterable[Tensor]) -> str | None:
    for tensor in tensors:
        if not tensor.is_cpu:
            return f"a tensor is on {tensor.device}"
        if tensor.dtype not in _DTYPES:
            return f"a tensor is {tensor.dtype}"
        if not tensor.is_contiguous():
            return "a tensor is not contiguous"
    return None


def _why_not_format(format: Format) -> str | None:
    if not format.packed:
        return None
    if format.family not in _FAMILIES:
        return f"format {format.name!r} is that of a published recipe"
    return f"blocks of more than {_cpu.MAX_BLOCK}" if format.block > _cpu.MAX_BLOCK else None


def _why_not_packed(state: Packed) -> str | None:
    reason = _why_not_format(state.format)
    if reason:
        return reason
    if not state.codes.is_cpu:
        return f"a state is on {state.codes.device}"
    if not (state.codes.is_contiguous() and state.scales.is_contiguous()):
        return "a state is not contiguous"
    return None


@functools.lru_cache(maxsize=64)
def _adam_constants(rule: AdamRule, step: int) -> tuple[float, ...]:
    return AdamConstants.of(rule, step)


@functools.lru_cache(maxsize=64)
def _sgd_constants(rule: SGDRule, step: int) -> tuple[float, ...]:
    return (*SGDConstants.of(rule), rule.nesterov, step == 1, 0.0, 0.0)


@functools.lru_cache(maxsize=64)
def _lion_constants(rule: LionRule, step: int) -> tuple[float, ...]:
    return (*LionConstants.of(rule), 0.0, 0.0, 0.0)


class _Step(NamedTuple):
    """How the items of one rule become records; `number` is that of `Rules` in `csrc/layout.h`."""

    number: int
    native: str
    reference: Callable[[Sequence[Item], Any], None]
    states: tuple[str, ...]
    constants: Callable[[Any, int], tuple[float, ...]]


_ADAM = _Step(0, "adam", reference.adam_step_, ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"), _adam_constants)
_SGD = _Step(1, "sgd", reference.sgd_step_, ("momentum_buffer",), _sgd_constants)
_LION = _Step(2, "lion", reference.lion_step_, ("exp_avg",), _lion_constants)
_STEPS = {AdamRule: _ADAM, SGDRule: _SGD, LionRule: _LION}


def _step_(step: _Step, items: Sequence[Item], rule: Rule) -> None:
    """Take a step: the heads of the records are known from the last one, the tails are those of the step."""
    table: list[bytes] = []
    tails: dict[int, bytes] = {}
    for item in items:
        head = _head(item, step, rule)
        if isinstance(head, str):
            step.reference([item], rule)
        elif item.param.numel():
            tail = tails.get(item.step) or tails.setdefault(item.step, _tail(item, step, rule))
            table += (head, tail)
    if table:
        getattr(_cpu, step.native)(b"".join(table), torch.get_num_threads())


def _head(item: Item, step: _Step, rule: Rule) -> bytes | str:
    """Return the head of an item's record, or why the reference works on it."""
    facts, memo = records.facts(item, rule), item.memo
    if memo is not None and memo.facts == facts:
        return memo.known  # type: ignore[no-any-return]
    known = why_not(item) or records.head(item, step.states, rule)
    if memo is not None:
        memo.facts, memo.known = facts, known
    return known


def _tail(item: Item, step: _Step, rule: Rule) -> bytes:
    return records.tail(item.step, step.constants(rule, item.step))
