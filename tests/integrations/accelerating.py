"""Runs under Accelerate, on one process and on several."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from tests.integrations.forks import die
from tests.integrations.tables import OPTIMIZERS, batch, equal, perceptron, weights

Run = tuple[Accelerator, nn.Module, torch.optim.Optimizer]


def run(optimizer: str) -> Run:
    kind, options = OPTIMIZERS[optimizer]
    model = perceptron(dropout=0.1)
    accelerator = Accelerator(cpu=True)
    return accelerator, *accelerator.prepare(model, kind(model.named_parameters(), **options))


def train(run: Run, steps: range) -> None:
    accelerator, model, optimizer = run
    for step in steps:
        data = batch(step, accelerator.process_index)
        accelerator.backward((model(data) - data).square().mean())
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def killed(folder: Path) -> None:
    """Save all the runs, and let a rank die in the middle of the last."""
    for optimizer in OPTIMIZERS:
        begun = run(optimizer)
        train(begun, range(3))
        begun[0].save_state(str(folder / optimizer), safe_serialization=False)
        train(begun, range(3, 4))
    if begun[0].is_last_process:
        die()
    train(begun, range(4, 6))


def resumed(folder: Path, processes: int) -> dict[str, Any]:
    """Return, by optimizer, whether the resumed run has the weights of one that nobody disturbed."""
    same = {}
    for optimizer in OPTIMIZERS:
        whole = run(optimizer)
        assert whole[0].num_processes == processes
        train(whole, range(3))
        torch.manual_seed(1)  # what load_state brings back decides on dropout
        again = run(optimizer)
        again[0].load_state(str(folder / optimizer))
        at_checkpoint = weights(again[1])
        train(again, range(3, 6))
        again_end = weights(again[1])
        whole = run(optimizer)
        train(whole, range(6))
        assert not equal(at_checkpoint, again_end)
        same[optimizer] = equal(again_end, weights(whole[1]))
    return same
