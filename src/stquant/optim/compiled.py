"""Steps inside `torch.compile`: one operator in the graph for all parameters.

What a compiler traces it takes for constant, so a traced step reads nothing that changes from step
to step, like a learning rate: its graph holds one call of `stquant::step_` with the tensors that
the step reads and changes, and the operator reads the rest when it runs. Steps that may change
formats, and all that finds something else than at the step before, run outside of the graph, as
does the first one; `TracedStep` is what is left for the next step to be traced with.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from stquant.checkpoint.restore import named
from stquant.checkpoint.schema import CONTROL, GROUP_KEY, read_group
from stquant.distributed import tensors
from stquant.kernels.backend import resolve
from stquant.optim.capturing import count_
from stquant.optim.items import items_of
from stquant.policy.budget import is_adaptive
from stquant.report.memory import tensors_of

if TYPE_CHECKING:
    from stquant.optim.base import PackedOptimizer

_optimizers: weakref.WeakValueDictionary[int, PackedOptimizer] = weakref.WeakValueDictionary()
"""The optimizers that graphs refer to by number."""


@dataclass(slots=True)
class TracedStep:
    """The tensors of a step that a graph may take; lists, because the compiler guards their items.

    Attributes:
        optimizer: Number of the optimizer.
        params: Its parameters.
        buffers: What their states hold, in the order of `_buffers`; empty for one without states.
    """

    optimizer: int
    params: list[Tensor]
    buffers: list[list[Tensor]]

    @classmethod
    def of(cls, optimizer: PackedOptimizer) -> TracedStep | None:
        """Return the tensors of the next step, or None if that is not one for a graph."""
        entries = list(named(optimizer.param_groups))
        if any(tensors.is_distributed(entry.param) for entry in entries) or any(
            _is_measured(entry.group, int(optimizer.state[entry.param]["step"]) + 1)
            for entry in entries
            if optimizer.state.get(entry.param) and not entry.group.get("capturable")
        ):
            return None
        number = id(optimizer)
        _optimizers[number] = optimizer
        return cls(
            number,
            [entry.param for entry in entries],
            [_buffers(optimizer.state.get(entry.param, {})) for entry in entries],
        )


def traced_step(optimizer: PackedOptimizer, closure: Callable[[], Any] | None) -> Any:
    """Take a step while the compiler traces it; see `PackedOptimizer.step`."""
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    traced = optimizer._traced
    if traced is None or optimizer._finish_backward is not None:
        _step_outside(optimizer)
        return loss
    places, params, grads, buffers = [], [], [], []
    for place, param in enumerate(traced.params):
        grad = param.grad
        if grad is not None:
            if not traced.buffers[place] or grad.layout is not torch.strided:
                _step_outside(optimizer)
                return loss
            places.append(place)
            params.append(param)
            grads.append(grad)
            buffers.extend(traced.buffers[place])
    if places:
        torch.ops.stquant.step_(traced.optimizer, places, params, grads, buffers)
    return loss


@torch._disable_dynamo  # type: ignore[attr-defined]  # `torch.compiler.disable` loads the compiler at import
def _step_outside(optimizer: PackedOptimizer) -> None:
    """Take a step as without a compiler, and prepare the next one for it."""
    optimizer._step()
    optimizer._traced = TracedStep.of(optimizer)


@torch.library.custom_op("stquant::step_", mutates_args=("params", "buffers"))
def step_(
    optimizer: int, places: Sequence[int], params: Sequence[Tensor], grads: Sequence[Tensor], buffers: Sequence[Tensor]
) -> None:
    """Take the step of some parameters of an optimizer, in place; no formats change.

    Args:
        optimizer: Number of the optimizer, whose groups say how to step.
        places: Places of the parameters among all of the optimizer.
        params: The parameters.
        grads: Their gradients.
        buffers: What their states hold, one after the other.

    Raises:
        RuntimeError: States were replaced since the graph was made, not by the optimizer itself.
    """
    owner = _optimizers[optimizer]
    entries = list(named(owner.param_groups))
    _check_current(owner, [entry.param for entry in entries])
    given, kernels = iter(buffers), resolve(owner._backend_name)
    parts = zip([entries[place] for place in places], params, grads, strict=True)
    for _, members in itertools.groupby(parts, key=lambda part: id(part[0].group)):
        part = list(members)
        group = part[0][0].group
        work = [(param, grad, _with_buffers(owner.state[entry.param], given)) for entry, param, grad in part]
        items = items_of([entry for entry, _, _ in part], tuple(owner._states(group)), work, None)
        rule = owner._rule(group, read_group(group[GROUP_KEY]).seed)
        if group.get("capturable"):
            count_(owner._backend_name, [entry for entry, _, _ in part], items, rule)
        elif any(_is_measured(group, step) for step in {item.step + 1 for item in items}):
            owner._traced = None
        getattr(kernels, owner.OPERATION)(items, rule)


@step_.register_fake
def _(*arguments: Any) -> None:
    """Nothing is returned, and no shape changes."""


def _check_current(optimizer: PackedOptimizer, params: Sequence[Tensor]) -> None:
    traced = optimizer._traced
    if traced is not None:
        live = itertools.chain(params, *(_buffers(optimizer.state.get(param, {})) for param in params))
        known = itertools.chain(traced.params, *traced.buffers)
        if all(a is b for a, b in itertools.zip_longest(live, known)):
            return
        optimizer._traced = None
        raise RuntimeError(
            "parameters or states of the optimizer were replaced after its step was compiled; "
            "call step() once outside of the compiled function"
        )


def _is_measured(group: dict[str, Any], step: int) -> bool:
    """Whether a parameter of a group is measured in its step of that number, so that formats may change."""
    policy = read_group(group[GROUP_KEY]).policy
    return is_adaptive(policy) and policy.due(step)


def _buffers(state: Mapping[str, Any]) -> list[Tensor]:
    """The tensors of a state that a step reads or changes."""
    found: list[Tensor] = []
    for value in _stepped(state).values():
        found.extend(tensors_of(value))
    return found


def _with_buffers(state: Mapping[str, Any], given: Iterator[Tensor]) -> dict[str, Any]:
    """The state with other tensors in the place of its own."""
    found = dict(state)
    for name, value in _stepped(state).items():
        if isinstance(value, Tensor):
            found[name] = next(given)
        else:
            found[name] = value.with_tensors(*itertools.islice(given, len(value.tensors())))
    return found


def _stepped(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name not in ("noise_id", CONTROL)}
