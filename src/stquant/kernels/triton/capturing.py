"""What a step takes from step counts and learning rate, made on the device.

A CUDA graph repeats a step with the addresses that it was captured with and nothing else from the
host. So counts and learning rate stay on the device, and so do tables of what follows from a count,
written by the host's own arithmetic; the rest is a few IEEE operations in double, which have one
result everywhere. The keys of random numbers are integers. Hence the bits are those of other steps.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from stquant.codecs import rounding
from stquant.kernels.corrections import correction_of, fold_adam, fold_lion, prepay_table, settles_at
from stquant.kernels.ops import AdamRule, LionRule

MAX_TABLE = 1 << 22
"""Most entries of a table: 32 MiB."""

WEIGHT_KEY, SECOND_KEY, CONSTANTS = 6, 14, 22
"""Places in a record; `records` has the layout."""


def why_not_captured(rule: Any) -> str | None:
    """Say why steps of a rule cannot be captured, or None if they can."""
    if not isinstance(rule, AdamRule | LionRule):
        return "its rule reads the step count on the host"
    if isinstance(rule, AdamRule) and max(map(settles_at, rule.betas)) > MAX_TABLE:
        return f"betas={rule.betas} need tables of bias corrections of more than {MAX_TABLE:,} entries"
    return None


def finish_(table: Tensor, counters: Sequence[Tensor], rule: AdamRule | LionRule) -> None:
    """Complete the records of a step that the host has written but for what its count decides.

    Args:
        table: int64 `[records, numbers]`, with the stems of keys in the place of keys.
        counters: The step count of each record, 0-dim fp32.
        rule: Hyperparameters.
    """
    steps = torch.stack(list(counters)).long()
    for place in (WEIGHT_KEY, SECOND_KEY):
        table[:, place] = rounding.keys(table[:, place], steps)
    lr: Any = rule.lr if rule.rate is None else rule.rate.reshape(()).double()
    for place, value in enumerate(_FOLD[type(rule)](rule, lr, steps)):
        if isinstance(value, Tensor):
            table[:, CONSTANTS + place] = value.float().view(torch.int32).long()
        else:
            table[:, CONSTANTS + place].fill_(_pattern(value))


def _fold_adam(rule: AdamRule, lr: Any, steps: Tensor) -> tuple[Any, ...]:
    beta1, beta2 = rule.betas

    def at(values: Tensor) -> Tensor:
        return values[steps.clamp(max=len(values) - 1)]

    tables = (_roots(beta2, steps.device), _corrections(beta1, steps.device), _prepay(beta1, steps.device))
    return fold_adam(rule, lr, *map(at, tables))


def _fold_lion(rule: LionRule, lr: Any, steps: Tensor) -> tuple[Any, ...]:
    return fold_lion(rule, lr)


_FOLD: dict[type, Callable[[Any, Any, Tensor], tuple[Any, ...]]] = {AdamRule: _fold_adam, LionRule: _fold_lion}


def _pattern(value: float) -> int:
    """Bit pattern of a number, rounded to fp32."""
    return int.from_bytes(struct.pack("<f", value), "little")


# Kept for good: a graph reads them at each replay, and nobody tells when it is gone.


@functools.cache
def _roots(beta: float, device: torch.device) -> Tensor:
    return _table([math.sqrt(correction_of(beta, step)) for step in range(settles_at(beta) + 1)], device)


@functools.cache
def _corrections(beta: float, device: torch.device) -> Tensor:
    return _table([correction_of(beta, step) for step in range(settles_at(beta) + 1)], device)


@functools.cache
def _prepay(beta: float, device: torch.device) -> Tensor:
    return _table(prepay_table(beta), device)


def _table(values: Sequence[float], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).to(device)
