"""What the runs under all trainers share: optimizers, data, comparison."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import stquant
from stquant.report import runlog

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "torch": (torch.optim.AdamW, {"lr": 1e-2}),
    "solo42": (stquant.AdamW, {"lr": 1e-2, "policy": "solo42"}),
    "adaptive": (stquant.AdamW, {"lr": 1e-2, "policy": stquant.Budget(bits=3.0, every=1)}),
}
"""torch's AdamW runs through the same lines, so that a trainer that does not resume exactly shows."""


def batch(step: int, rank: int = 0) -> Tensor:
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(2 * step + rank))


def perceptron(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Dropout(dropout), nn.Linear(96, 64))


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the weights, whole ones where they are sharded."""
    found = {name: getattr(value, "full_tensor", lambda v=value: v)() for name, value in model.state_dict().items()}
    return {name: value.detach().clone() for name, value in found.items()}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def same_logs(a: Path, b: Path) -> bool:
    """Whether two run logs tell the same of every step from the first on."""
    first, second = runlog.read(a), runlog.read(b)
    steps = [step for step, _ in first.losses]
    assert steps == list(range(1, len(steps) + 1)) == [decision.step for decision in first.decisions]
    return (first.decisions, first.losses) == (second.decisions, second.losses)
