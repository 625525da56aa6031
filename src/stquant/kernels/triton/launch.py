"""Launches: one kernel call for all parameters that agree in formats and dtypes.

Every parameter becomes a record of numbers and addresses (`records` has the layout), which `tables`
brings to the device. What the kernels do not serve goes to the reference, item by item; `serving`
says what that is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stquant.codecs import rounding
from stquant.codecs.blocks import Grid, Strides
from stquant.codecs.rounding import Stream
from stquant.kernels import reference
from stquant.kernels.corrections import AdamConstants, LionConstants, SGDConstants
from stquant.kernels.ops import AdamRule, Item, LionRule, Packed, Rule, SGDRule, State
from stquant.kernels.records import facts as facts_of
from stquant.kernels.reference.stats import ENERGY_BINS, StateStats
from stquant.kernels.triton import steps, transfers
from stquant.kernels.triton.records import APART
from stquant.kernels.triton.serving import (
    DTYPES,
    FAMILIES,
    is_whole,
    strides_of,
    tensors_of_its_shape,
    why_not,
    why_not_packed,
    why_not_tensors,
)
from stquant.kernels.triton.tables import Constants, Record, Variant, start

CHUNK = 1024
"""Elements of a tile of whole blocks; each of 128 threads then has two 16-byte loads of fp32."""
RAGGED_CHUNK = 128
"""Elements of a tile that may have short blocks, whose bookkeeping takes registers."""

_PLAIN = 1
_NO_STATE = (0,) * 5
_NO_CONSTANTS = (0.0,) * 9
_ONE, _MANTISSA = 0x3F800000, 23


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
    if why_not_tensors([out, state.codes]) or why_not_packed(state, [out]):
        return reference.decode(state, out)
    if out.numel():
        _transfer_(transfers.decode, [state], out)
    return out


def encode_(state: Packed, values: Tensor) -> None:
    """Overwrite a packed state with plain values; see `reference.encode_`."""
    if why_not_tensors([values, state.codes]) or why_not_packed(state, [values]):
        reference.encode_(state, values)
    elif values.numel():
        _transfer_(transfers.encode, [state], values)


def recode_(source: Packed, target: Packed) -> None:
    """Overwrite `target` with the values of `source`; see `reference.recode_`."""
    if source.grid != target.grid or why_not_packed(source) or why_not_packed(target):
        reference.recode_(source, target)
    elif source.scales.numel():
        _transfer_(transfers.recode, [source, target])


def state_stats(state: Packed) -> StateStats:
    """Measure a packed state; see `reference.state_stats`. Waits for the device."""
    if why_not_packed(state) or not state.scales.numel():
        return reference.state_stats(state)
    sums = torch.zeros(5 + ENERGY_BINS, dtype=torch.int64, device=state.codes.device)
    _transfer_(transfers.stats, [state], sums)
    zeros, saturated, ratio, ratio2, ratio4, *energy = sums.tolist()
    return StateStats(state.grid.elements, zeros, saturated, ratio, ratio2, ratio4, tuple(energy))


# ------------------------------------------------------------------------------------ steps


class _Step(NamedTuple):
    """How the items of one rule become launches."""

    kernel: Any
    reference: Callable[[Sequence[Item], Any], None]
    states: tuple[str, ...]
    constants: Callable[[Any, int], Constants]
    variant: Callable[[Item, Any], dict[str, int]]


class _Known(NamedTuple):
    """An item's part of a launch as it stays from step to step: no constants, and stems in the fields for `keys`."""

    variant: Variant
    record: Record
    keys: tuple[int, ...]


def _step_(step: _Step, items: Sequence[Item], rule: Rule) -> None:
    launches: dict[Variant, list[Record]] = {}
    constants: dict[int, Constants] = {}
    for item in items:
        known = _known(step, item, rule)
        if isinstance(known, str):
            assert item.counter is None, "`why_not_captured` was not asked"
            step.reference([item], rule)
        elif item.param.numel():
            launches.setdefault(known.variant, []).append(_record_of_step(step, known, item, rule, constants))
    for variant, found in launches.items():
        start(step.kernel, variant, found, rule)


def _known(step: _Step, item: Item, rule: Rule) -> _Known | str:
    """Return an item's part of a launch, from the last step if nothing has changed, or why there is none."""
    compiled_in = (getattr(rule, "decoupled", None), getattr(rule, "nesterov", None), rule.weight_decay != 0.0)
    facts, memo = [type(rule), *compiled_in, *facts_of(item, rule)], item.memo
    known: _Known | str
    if memo is not None and memo.facts == facts:
        known = memo.known
        return known
    known = why_not(item) or _Known(_variant(step, item, rule), *_record(step, item, rule))
    if memo is not None:
        memo.facts, memo.known = facts, known
    return known


def _variant(step: _Step, item: Item, rule: Rule) -> Variant:
    constants = {
        "PARAM": DTYPES[item.param.dtype],
        "GRAD": DTYPES[item.grad.dtype],
        "RESIDUAL_BITS": 0 if item.residual is None else item.residual.bits,
        "STOCHASTIC": _noise(item.grid) if item.stochastic and item.param.dtype is not torch.float32 else 0,
        "MAXIMIZE": int(rule.maximize),
        **step.variant(item, rule),
        **_geometry(item.grid, tensors_of_its_shape(item)),
    }
    return Variant(item.param.device, tuple(constants.items()))


def _geometry(grid: Grid, plain: Iterable[Tensor]) -> dict[str, int]:
    """Tiles: those of rows of whole blocks are the fast ones."""
    whole = is_whole(grid, plain)
    return {
        "WHOLE": int(whole),
        "BLOCKS": max(1, (CHUNK if whole else RAGGED_CHUNK) // grid.block),
        "BLOCK": grid.block,
    }


def _momentum_variant(state: State | None) -> dict[str, int]:
    if state is None:
        return {"FIRST": 0, "FIRST_BITS": 0}
    if isinstance(state, Tensor):
        return {"FIRST": _PLAIN, "FIRST_BITS": 0}
    return {"FIRST": FAMILIES[state.format.family], "FIRST_BITS": state.format.bits}


def _prepays(state: State | None) -> int:
    return int(state is not None and not isinstance(state, Tensor) and state.format.prepay)


def _adam_variant(item: Item, rule: AdamRule) -> dict[str, int]:
    second = item.states["exp_avg_sq"]
    packed = None if isinstance(second, Tensor) else second.format
    return {
        "DECAYED": int(not rule.decoupled and rule.weight_decay != 0.0),
        **_momentum_variant(item.states["exp_avg"]),
        "PREPAY": _prepays(item.states["exp_avg"]),
        "SECOND": _PLAIN if packed is None else FAMILIES[packed.family],
        "SECOND_BITS": 0 if packed is None else packed.bits,
        "NOISY": _noise(item.grid) if packed is not None and packed.stochastic else 0,
        "MAXIMUM": int("max_exp_avg_sq" in item.states),
    }


def _sgd_variant(item: Item, rule: SGDRule) -> dict[str, int]:
    state = item.states.get("momentum_buffer")
    return {
        "DECAYED": int(rule.weight_decay != 0.0),
        **_momentum_variant(state),
        "PREPAY": _prepays(state),
        "NESTEROV": int(rule.nesterov),
    }


def _lion_variant(item: Item, rule: LionRule) -> dict[str, int]:
    return _momentum_variant(item.states["exp_avg"])


@functools.lru_cache(maxsize=64)
def _adam_constants(rule: AdamRule, step: int) -> Constants:
    return AdamConstants.of(rule, step)


@functools.lru_cache(maxsize=64)
def _sgd_constants(rule: SGDRule, step: int) -> Constants:
    return (*SGDConstants.of(rule), float(step == 1), 0.0, 0.0, 0.0)


@functools.lru_cache(maxsize=64)
def _lion_constants(rule: LionRule, step: int) -> Constants:
    return (*LionConstants.of(rule), 0.0, 0.0, 0.0)


_ADAM = _Step(
    *(steps.adam, reference.adam_step_, ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")), _adam_constants, _adam_variant
)
_SGD = _Step(steps.sgd, reference.sgd_step_, ("momentum_buffer",), _sgd_constants, _sgd_variant)
_LION = _Step(steps.lion, reference.lion_step_, ("exp_avg",), _lion_constants, _lion_variant)


# ---------------------------------------------------------------------------------- records


def _record(step: _Step, item: Item, rule: Rule) -> tuple[Record, tuple[int, ...]]:
    """The last two fields of `_Known`."""
    fields = [
        item.param.data_ptr(),
        item.grad.data_ptr(),
        0 if item.residual is None else item.residual.codes.data_ptr(),
        rounding.parameter_key(rule.seed, item.noise_id, Stream.WEIGHT) if item.stochastic else 0,
    ]
    keys = [3] if item.stochastic else []
    for name in step.states:
        state = item.states.get(name)
        if isinstance(state, Tensor):
            fields += (state.data_ptr(), 0, 0, 0, 0)
        elif state is None:
            fields += _NO_STATE
        elif state.format.stochastic and not state.format.signed:
            keys.append(len(fields) + 2)
            fields += _state_fields(state, rounding.parameter_key(rule.seed, item.noise_id, Stream.EXP_AVG_SQ))
        else:
            fields += _state_fields(state)
    fields += _NO_STATE * (3 - len(step.states))
    return Record(item.grid, tuple(fields), _NO_CONSTANTS, strides_of(item.grid) or Strides(0)), tuple(keys)


def _record_of_step(step: _Step, known: _Known, item: Item, rule: Rule, constants: dict[int, Constants]) -> Record:
    """Complete a record; that of an item with a counter is completed on the device."""
    grid, fields, _, strides, _ = known.record
    if item.counter is not None:
        return Record(grid, fields, _NO_CONSTANTS, strides, item.counter)
    if item.step not in constants:
        constants[item.step] = step.constants(rule, item.step)
    if known.keys:
        drawn = list(fields)
        for place in known.keys:
            drawn[place] = rounding.mix64(drawn[place] ^ item.step)
        fields = tuple(drawn)
    return Record(grid, fields, constants[item.step], strides)


def _state_fields(state: Packed, key: int = 0) -> tuple[int, ...]:
    lowest = _ONE + state.octaves.lo * (1 << _MANTISSA)
    return (state.codes.data_ptr(), state.scales.data_ptr(), key, lowest, _MANTISSA + state.octaves.log2_step)


def _noise(grid: Grid) -> int:
    """How a rounding that draws finds the numbers of elements: in rows that follow each other, or APART."""
    strides = strides_of(grid)
    return APART.value if strides is not None and strides.run else 1


def _transfer_(kernel: Any, states: Sequence[Packed], tensor: Tensor | None = None) -> None:
    """Launch a kernel on one or two states of a grid, and a plain tensor (for statistics: the sums)."""
    constants = {
        "DTYPE": DTYPES.get(tensor.dtype, 0) if tensor is not None else 0,
        "FAMILY": FAMILIES[states[0].format.family],
        "BITS": states[0].format.bits,
        "TO_FAMILY": FAMILIES[states[-1].format.family],
        "TO_BITS": states[-1].format.bits,
        **_geometry(states[0].grid, [] if tensor is None else [tensor]),
    }
    fields = [0 if tensor is None else tensor.data_ptr(), 0, 0, 0]
    for state in states:
        fields += _state_fields(state)
    fields += _NO_STATE * (3 - len(states))
    record = Record(states[0].grid, tuple(fields), _NO_CONSTANTS)
    start(kernel, Variant(states[0].codes.device, tuple(constants.items())), [record])
