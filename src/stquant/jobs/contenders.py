"""With which optimizers a workload is trained."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stquant import SGD, AdamW, Fixed, Lion
from stquant.errors import FormatError, did_you_mean
from stquant.jobs.workloads import Workload
from stquant.policy import policies
from stquant.policy.policies import Policy

MakeOptimizer = Callable[[Iterable[tuple[str, nn.Parameter]], Workload], torch.optim.Optimizer]


@dataclass(frozen=True, slots=True)
class Contender:
    """A named way to make an optimizer for a workload."""

    name: str
    make: MakeOptimizer


def _torch_adamw(params: Any, workload: Workload) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=workload.lr, betas=workload.betas, weight_decay=workload.weight_decay)


def _torch_nadam(params: Any, workload: Workload) -> torch.optim.Optimizer:
    return torch.optim.NAdam(
        params,
        lr=workload.lr,
        betas=workload.betas,
        weight_decay=workload.weight_decay,
        decoupled_weight_decay=True,
    )


def contender(text: str, seed: int = 0, master_bits: int | str | None = "auto") -> Contender:
    """Return the contender that a command line names.

    Args:
        text: "torch" (fp32 AdamW of torch), "nadam" (fp32 NAdam of torch), "fp32" (ours,
            unpacked), a published recipe such as "bnb8", a width such as "4", or formats or
            widths of `exp_avg` and `exp_avg_sq` such as "2+0" or "dynamic2+log1". "sgd:" and
            "lion:" before "fp32", a recipe, a width or a format take those optimizers.
        seed: Seed of stochastic rounding.
        master_bits: Bits of the residual of bf16 parameters.

    Raises:
        FormatError: `text` is none of these.
    """
    if text == "torch":
        return Contender("torch AdamW", _torch_adamw)
    if text == "nadam":
        return Contender("torch NAdam", _torch_nadam)
    kind, _, formats = text.rpartition(":")
    if kind not in _OURS:
        hint = did_you_mean(kind, _OURS)
        raise FormatError(f"optimizer {kind!r} of {text!r} is unknown; use one of {sorted(filter(None, _OURS))}{hint}")
    ours = _OURS[kind]
    policy = policy_of(formats, ours.states)

    def make(params: Any, workload: Workload) -> torch.optim.Optimizer:
        options = ours.options(workload)
        return ours.make(params, policy=policy, master_bits=master_bits, seed=seed, **options)

    return Contender(f"STQuant {text}", make)


@dataclass(frozen=True, slots=True)
class _Ours:
    """One of our optimizers: its states, and its recipe derived from that of AdamW."""

    make: Callable[..., torch.optim.Optimizer]
    states: tuple[str, ...]
    options: Callable[[Workload], dict[str, Any]]


_OURS = {
    "": _Ours(
        AdamW,
        ("exp_avg", "exp_avg_sq"),
        lambda w: {"lr": w.lr, "betas": w.betas, "weight_decay": w.weight_decay},
    ),
    "sgd": _Ours(
        SGD,
        ("momentum_buffer",),
        lambda w: {"lr": 100 * w.lr, "momentum": 0.9, "weight_decay": 1e-4},
    ),
    "lion": _Ours(Lion, ("exp_avg",), lambda w: {"lr": w.lr / 5, "weight_decay": 5 * w.weight_decay}),
}
"""Lion's step is a sign, so its rate is smaller and its decay larger; SGD's rate is not adaptive."""


def policy_of(text: str, states: tuple[str, ...] = _OURS[""].states) -> Policy:
    """Return the policy that a command line names for an optimizer with these states.

    Raises:
        FormatError: `text` is neither a policy's name, a width, nor a format for each state.
    """
    if text in policies.NAMES:
        return policies.parse(text)
    parts: list[str | int] = [int(part) if part.isdigit() else part for part in text.split("+")]
    if len(parts) == 1 and isinstance(parts[0], int):
        return Fixed(bits=parts[0])
    if len(parts) != len(states):
        raise FormatError(
            f"policy {text!r} is unknown; use torch, nadam, {', '.join(policies.NAMES)}, a width such as 4, "
            f"or formats of {' and '.join(states)} such as {'+'.join('21'[: len(states)])}"
            + did_you_mean(text, ("torch", "nadam", *policies.NAMES))
        )
    formats: dict[str, Any] = dict(zip(states, parts, strict=True))
    return Fixed(**formats)


DEMO = ("torch", "nadam", "adaptive", "2+0", "4")
"""The rows of the demo: the yardstick, its control, and three of ours."""
