"""Bytes that live objects hold: storages, each counted once, whoever refers to them.

`live` counts what a training step keeps of its model and optimizer now, `peak` what it kept at
most. Activations and temporaries are not counted: where torch's allocator counts them, that is on
CUDA, `peak` reports its figure beside.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of a training step; `str()` of it is a line in bytes per parameter.

    Attributes:
        parameters: Number of weights.
        weights: Bytes of the weights.
        residuals: Bytes of the residuals of bf16 weights.
        states: Bytes of all other states of the optimizer, step counts included.
        gradients: Bytes of the gradients.
    """

    parameters: int
    weights: int
    residuals: int
    states: int
    gradients: int

    @property
    def total(self) -> int:
        """Bytes of all kinds together."""
        return self.weights + self.residuals + self.states + self.gradients

    def per_parameter(self) -> dict[str, float]:
        """Return the bytes of each kind, and of all, per weight."""
        kinds = [field.name for field in fields(self)[1:]]
        return {kind: getattr(self, kind) / max(1, self.parameters) for kind in (*kinds, "total")}

    def __str__(self) -> str:
        parts = ", ".join(f"{kind} {value:.2f}" for kind, value in self.per_parameter().items())
        return f"bytes per parameter: {parts} ({self.parameters:,} parameters)"


@dataclass(slots=True)
class Peak:
    """What `peak` fills in.

    Attributes:
        each: The most that each kind held, not necessarily at one time.
        together: The moment at which all kinds together held most.
        allocated: By CUDA device, the most bytes that torch had allocated at once, activations and
            temporaries included.
    """

    each: Memory
    together: Memory
    allocated: dict[torch.device, int]

    def _note(self, now: Memory) -> None:
        self.each = Memory(*(max(getattr(self.each, f.name), getattr(now, f.name)) for f in fields(now)))
        if now.total > self.together.total:
            self.together = now


def live(model: nn.Module, optimizer: torch.optim.Optimizer) -> Memory:
    """Return the bytes that weights, residuals, states and gradients hold now.

    Args:
        model: The model.
        optimizer: Any torch optimizer of it; parameters that only one of the two has count, too.
    """
    return _count(model, optimizer, None)


@contextlib.contextmanager
def peak(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Peak]:
    """Record the most that weights, residuals, states and gradients hold inside the context.

    Counts when a gradient arrives, before it is added, used or freed, and before and after
    `step()`. Each count takes all parameters, so a step of many parameters gets slow. What
    autograd holds of a gradient before it is complete (a weight that is used twice) is not seen,
    nor is the gradient that `fully_shard` has not reduced yet.

    Args:
        model: The model.
        optimizer: Any torch optimizer of it.

    Yields:
        The record, complete when the context ends.
    """
    devices = {p.device for p in _parameters(model, optimizer) if p.device.type == "cuda"}
    for device in devices:
        torch.cuda.reset_peak_memory_stats(device)
    start = live(model, optimizer)
    record = Peak(start, start, {})

    def count(*_: Any) -> None:
        record._note(live(model, optimizer))

    def arrive(grad: Tensor) -> None:
        record._note(_count(model, optimizer, grad))

    handles: list[Any] = [optimizer.register_step_pre_hook(count), optimizer.register_step_post_hook(count)]
    for param in _parameters(model, optimizer):
        if param.requires_grad:
            register: Any = param.register_hook
            handles.append(register(arrive))
    try:
        yield record
    finally:
        for handle in handles:
            handle.remove()
        count()
        record.allocated = {device: torch.cuda.max_memory_allocated(device) for device in devices}


def _count(model: nn.Module, optimizer: torch.optim.Optimizer, arriving: Tensor | None) -> Memory:
    params = _parameters(model, optimizer)
    states = list(optimizer.state.values())
    gradients = [*(p.grad for p in params), arriving]
    return Memory(
        parameters=sum(p.numel() for p in params),
        weights=held_bytes(params),
        residuals=held_bytes(tensors_of([state.get("residual") for state in states])),
        states=held_bytes(tensors_of([{k: v for k, v in state.items() if k != "residual"} for state in states])),
        gradients=held_bytes(grad for grad in gradients if grad is not None),
    )


def _parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    own = [param for group in optimizer.param_groups for param in group["params"]]
    return list(dict.fromkeys([*model.parameters(), *own]))


def held_bytes(tensors: Any) -> int:
    """Return the bytes of the storages behind tensors; shared and viewed ones count once and whole.

    A tensor that is made of others counts with those: a distributed one with its local part, a
    quantized one of another package with its codes and scales. A tensor without memory does not count.
    """
    storages = {}
    for local in itertools.chain.from_iterable(map(_plain, tensors)):
        storage = local.untyped_storage()
        if local.device.type == "meta":
            # Storages on the meta device have no address, only an identity.
            storages[local.device, storage._cdata] = storage
        elif storage.nbytes() and (local.data_ptr() or not local.numel()):
            storages[local.device, storage.data_ptr()] = storage  # held, so that no other one takes its place
    return sum(storage.nbytes() for storage in storages.values())


def _plain(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensors with memory of their own that a tensor is made of; mostly itself."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for name in names:
        yield from _plain(getattr(tensor, name))


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Yield every tensor in a live state: in dicts, in lists, and in packed states."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from tensors_of(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_of(part)
    elif hasattr(value, "tensors"):
        yield from value.tensors()


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes that the states of any torch optimizer hold, step counts included."""
    return held_bytes(tensors_of(optimizer.state))


def state_elements(optimizer: torch.optim.Optimizer) -> int:
    """Return the number of elements that the states describe: two per parameter element for Adam."""
    return sum(
        param.numel() * sum(key.startswith("exp_avg") or key == "momentum_buffer" for key in state)
        for param, state in optimizer.state.items()
    )
