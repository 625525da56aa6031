"""Small models and gradients for optimizer tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from stquant import Fixed

SHAPES = ((64, 128), (40, 160), (33, 129), (8, 4, 6, 6), (130,), ())

POLICIES = {
    "fp32": "fp32",
    "default": Fixed(exp_avg="dynamic2", exp_avg_sq="log1"),
    "4": Fixed(bits=4),
    "8": Fixed(bits=8),
    "3, prepaid": Fixed(exp_avg="dynamic3", exp_avg_sq="log2", block=64),
    "v only": Fixed(exp_avg_sq="log0"),
    "m only": Fixed(exp_avg="mulaw5-prepay"),
    "nearest v": Fixed(exp_avg="dynamic0", exp_avg_sq="log1-nearest"),
    "bnb8": "bnb8",
    "torchao4": "torchao4",
    "flash8": "flash8",
    "solo42": "solo42",
}


def parameters(
    shapes: Sequence[tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float32, seed: int = 0
) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def gradients(params: Sequence[torch.Tensor], steps: int, seed: int = 1) -> Iterator[list[torch.Tensor]]:
    """Yield gradients with persistent parts, different sizes per row, and zeros."""
    generator = torch.Generator().manual_seed(seed)
    bias = [torch.randn(p.shape, generator=generator) * 0.3 for p in params]
    for _ in range(steps):
        grads = []
        for p, b in zip(params, bias, strict=True):
            noise = torch.randn(p.shape, generator=generator)
            grad = (b + noise) * 10.0 ** float(torch.randn((), generator=generator))
            zero = torch.rand(p.shape, generator=generator) < 0.2
            grads.append(torch.where(zero, 0.0, grad).to(p.dtype))
        yield grads


def run(optimizer: torch.optim.Optimizer, params: Sequence[torch.nn.Parameter], grads: Any) -> None:
    """Take one step for every list of gradients."""
    for step in grads:
        for p, g in zip(params, step, strict=True):
            p.grad = g.clone()
        optimizer.step()


def snapshot(optimizer: torch.optim.Optimizer, params: Sequence[torch.nn.Parameter]) -> list[torch.Tensor]:
    """All tensors of parameters and states, copied, in a fixed order."""
    found = [p.detach().clone() for p in params]
    for state in optimizer.state_dict()["state"].values():
        for _, value in sorted(state.items()):
            parts = value.values() if isinstance(value, dict) else [value]
            found += [torch.as_tensor(part).clone() for part in parts]
    return found


def same(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> bool:
    """Bitwise equality of two snapshots."""
    return len(a) == len(b) and all(
        x.dtype == y.dtype and x.shape == y.shape and bool(((x == y) | (x.isnan() & y.isnan())).all())
        for x, y in zip(a, b, strict=True)
    )
