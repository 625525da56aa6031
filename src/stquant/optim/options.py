"""Checks of hyperparameters and gradients: what a step cannot honour is refused, never ignored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from stquant.checkpoint.restore import Named
from stquant.policy.policies import Policy

_UNSUPPORTED = {
    "foreach": "one kernel call already takes the whole list of parameters",
    "differentiable": "a step works in place on packed states",
}


def check_range(name: str, value: float, given: Any, low: float, below: float = float("inf")) -> None:
    """Raise `ValueError` unless low <= value < below; the message shows what was given."""
    if not low <= value < below:
        allowed = f"at least {low:g}" + ("" if below == float("inf") else f" and below {below:g}")
        raise ValueError(f"{name}={given!r} is out of range; allowed is {allowed}")


def check_unsupported(group: dict[str, Any]) -> None:
    """Raise `ValueError` if an option of torch's asks for something that there is not."""
    for name, reason in _UNSUPPORTED.items():
        if group.get(name):
            raise ValueError(f"{name}={group[name]!r} is not supported: {reason}; leave {name} at its default")


def check_fused(name: str, reason: str | None) -> None:
    """Raise `ValueError` if there is a reason why `fused=True` cannot be honoured for the parameter `name`."""
    if reason:
        raise ValueError(
            f"fused=True is not supported for parameter {name!r}: no compiled kernel serves it ({reason}); "
            "leave fused at its default"
        )


def check_prepay(policy: Policy, states: Mapping[str, bool], cause: str) -> None:
    """Raise `ValueError` if the policy prepays a state where `cause` makes that impossible."""
    for name, format in policy.formats_of(states).items():
        if format.prepay:
            raise ValueError(
                f"{format.name} of {name} prepays what it rounds away, which {cause} does not admit; "
                "use a format without prepay, for example mulaw4"
            )


def check_gradient(entry: Named) -> None:
    """Raise `RuntimeError` if a parameter has a gradient that no kernel takes."""
    grad = entry.param.grad
    if grad is not None and grad.layout is not torch.strided:
        raise RuntimeError(
            f"parameter {entry.name!r} has a gradient of layout {grad.layout}, allowed is a dense one; "
            "use for example nn.Embedding(sparse=False)"
        )
