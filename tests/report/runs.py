"""Run logs: of a small real run, and made by hand where a number must be known."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from stquant import AdamW
from stquant.policy.budget import Budget
from stquant.policy.decision import Decision, StateDecision
from stquant.policy.factors import NAMES
from tests.optim.helpers import gradients

EVERY = 2


def toy() -> tuple[list[torch.nn.Parameter], AdamW]:
    """Three tensors, of which two are packed, under a budget that leaves something to decide."""
    shapes = ((64, 128), (130,), (40, 160))
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    named = zip(("body.weight", "body.bias", "head.weight"), params, strict=True)
    return params, AdamW(list(named), lr=0.01, policy=Budget(bits=3.0, every=EVERY))


def steps(optimizer: torch.optim.Optimizer, params: Sequence[torch.nn.Parameter], first: int, last: int) -> None:
    """Take the steps `first` to `last` of the one sequence of gradients there is."""
    for grads in list(gradients(params, last))[first - 1 :]:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        optimizer.step()


def state(parameter: str, name: str, old: str, new: str, **fields: Any) -> StateDecision:
    """One state of 1,024 elements; a block of 128 has a scale of 32 bits."""
    held = {"dynamic2": 288, "mulaw4": 544, "log1": 160, "log2": 288, "dynamic3": 416}
    given = {"predicted": 1.0, "measured": 2.0, "factors": dict.fromkeys(NAMES, 0.5), "why": "kept"}
    return StateDecision(
        parameter=parameter,
        state=name,
        elements=1024,
        old=old,
        new=new,
        old_bytes=held[old],
        new_bytes=held[new],
        **{**given, **fields},
    )


def decisions(budget: int | None = 1100) -> list[Decision]:
    """Two tensors, three decisions: one raises, one does nothing, one lowers."""
    rows = [
        (10, ("dynamic2", "mulaw4"), "raised: saves <b>much</b> & more"),
        (20, ("mulaw4", "mulaw4"), "resting after a change"),
        (40, ("mulaw4", "dynamic3"), "lowered: costs little"),
    ]
    found = []
    for step, (old, new), why in rows:
        states = (
            state("wte & <b>head", "exp_avg", old, new, why=why),
            state("wte & <b>head", "exp_avg_sq", "log1", "log1"),
            state("h.0.mlp", "exp_avg", "dynamic2", "dynamic2", predicted=2.5),
            state("h.0.mlp", "exp_avg_sq", "log1", "log1"),
        )
        held = 8 + sum(part.new_bytes for part in states)
        found.append(Decision(step, "Budget(bits=2.0)", budget, held, 100.0, states))
    return found


def write(path: Path, taken: Sequence[Decision], losses: Sequence[tuple[int, float]] = ()) -> Path:
    """Write a log by hand, as the document says that it looks."""
    names = list(dict.fromkeys(part.parameter for decision in taken for part in decision.states))
    header = {
        "kind": "run",
        "schema": 1,
        "optimizer": "AdamW",
        "parameters": {name: [8, 128] for name in names},
        "conditions": {"packages": {"stquant": "0.1.0"}},
    }
    lines: list[dict[str, Any]] = [{"kind": "loss", "step": step, "loss": loss} for step, loss in losses]
    lines += [{"kind": "decision", "step": d.step, "decision": d.to_dict()} for d in taken]
    lines.sort(key=lambda line: line["step"])
    path.write_text("".join(json.dumps(line) + "\n" for line in [header, *lines]))
    return path
