"""Steps that a CUDA graph may capture: with `capturable=True` counts and learning rates stay on the device.

Formats stay, too: nothing is measured or decided, which the host would have to wait for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stquant.checkpoint.restore import Named
from stquant.kernels.backend import why_not_captured
from stquant.kernels.ops import Item, Rule
from stquant.kernels.triton import has_gpu


def learning_rate(group: dict[str, Any]) -> tuple[float, Tensor | None]:
    """Return the learning rate of a group as a number or, where a graph is to read it, as a tensor."""
    lr = group["lr"]
    if group.get("capturable") and isinstance(lr, Tensor):
        return 0.0, lr
    return float(lr), None


def step_count(entry: Named) -> Tensor:
    """Return the count of a parameter that has taken no step."""
    return torch.zeros((), dtype=torch.float32, device=entry.param.device if entry.group.get("capturable") else "cpu")


def check_capturing(groups: Sequence[dict[str, Any]]) -> None:
    """Raise `RuntimeError` if a graph is being captured that would repeat this very step's numbers."""
    if has_gpu() and torch.cuda.is_current_stream_capturing() and not all(g.get("capturable") for g in groups):
        raise RuntimeError(
            "a CUDA graph captures step(), but a parameter group has no capturable=True; "
            "pass that to AdamW, Adam or Lion, other steps cannot be captured"
        )


def count_(backend: str | None, entries: Sequence[Named], items: Sequence[Item], rule: Rule) -> None:
    """Count a step on the device.

    Raises:
        RuntimeError: A parameter's step cannot be captured; nothing was changed.
    """
    for entry, item in zip(entries, items, strict=True):
        reason = why_not_captured(backend, item, rule)
        if reason:
            raise RuntimeError(
                f"capturable=True is not supported for parameter {entry.name!r}: no kernel takes its step "
                f"without the host ({reason}); leave capturable at its default"
            )
    torch._foreach_add_([item.counter for item in items if item.counter is not None], 1.0)
