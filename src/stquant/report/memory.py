"""Bytes that live objects hold: storages, each counted once, whoever refers to them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


def held_bytes(tensors: Any) -> int:
    """Return the bytes of the storages behind tensors; shared and viewed ones count once and whole."""
    storages = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        # Storages on the meta device have no address, only an identity.
        place = storage._cdata if tensor.device.type == "meta" else storage.data_ptr()
        storages[tensor.device, place] = storage  # held, so that no other one takes its place
    return sum(storage.nbytes() for storage in storages.values())


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Yield every tensor in a live state: in dicts, in lists, and in packed states."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
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
