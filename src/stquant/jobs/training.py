"""The training loop: one run of a workload with an optimizer, resumable bit for bit."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stquant.jobs.contenders import Contender
from stquant.jobs.workloads import Batch, Workload
from stquant.report.memory import state_bytes, state_elements

EVALUATIONS = 16
FINAL_EVALUATIONS = 4
CLIP_NORM = 1.0
WARMUP_SHARE = 0.08
FINAL_LR_SHARE = 0.05


@dataclass(slots=True)
class Curve:
    """What a run has shown so far.

    Attributes:
        steps: Steps at which the held-out loss was measured.
        losses: The losses.
    """

    steps: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    @property
    def final(self) -> float:
        """Mean of the last four held-out losses."""
        last = self.losses[-FINAL_EVALUATIONS:]
        return sum(last) / len(last) if last else math.nan


class Run:
    """One run: model, optimizer, schedule and curve.

    Args:
        workload: What is trained.
        contender: The optimizer.
        seed: Of the initial weights and the order of the data.
        steps: Steps of the whole run; the workload's own number if None.
        dtype: Of the parameters.
        evaluations: How many of the sixteen measurements of the held-out loss are made, the last
            ones; at least the four that the final loss is the mean of.
    """

    def __init__(
        self,
        workload: Workload,
        contender: Contender,
        seed: int = 0,
        steps: int | None = None,
        dtype: torch.dtype = torch.float32,
        evaluations: int = EVALUATIONS,
    ) -> None:
        torch.manual_seed(seed)
        self.workload = workload
        self.contender = contender
        self.seed = seed
        self.steps = workload.steps if steps is None else steps
        self.model = workload.build().to(dtype)
        self.optimizer = contender.make(self.model.named_parameters(), workload)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self._lr_share)
        self.done = 0
        self.curve = Curve()
        self._validation = [_to(batch, dtype) for batch in workload.validation()]
        self._dtype = dtype
        self._every = max(1, self.steps // EVALUATIONS)
        self._first = self.steps - evaluations * self._every + 1

    def train(self) -> Iterator[float]:
        """Take the remaining steps; yields the training loss of each."""
        self.model.train()
        while self.done < self.steps:
            batch = _to(self.workload.batch(self.seed, self.done), self._dtype)
            self.optimizer.zero_grad()
            loss = backward(self.model, batch)
            self.optimizer.step()
            self.schedule.step()
            self.done += 1
            if self.done >= self._first and (self.done % self._every == 0 or self.done == self.steps):
                self.curve.steps.append(self.done)
                self.curve.losses.append(self.evaluate())
            yield loss

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the mean loss over the held-out batches."""
        self.model.eval()
        losses = [_loss(self.model, batch).item() for batch in self._validation]
        self.model.train()
        return sum(losses) / len(losses)

    def result(self) -> dict[str, Any]:
        """Return what there is to report, as plain numbers, strings and lists."""
        held, described = state_bytes(self.optimizer), state_elements(self.optimizer)
        return {
            "model": self.workload.name,
            "optimizer": self.contender.name,
            "seed": self.seed,
            "steps": self.done,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "loss": self.curve.final,
            "state_bytes": held,
            "true_bits": 8 * held / described if described else math.nan,
            "curve": {"steps": self.curve.steps, "losses": self.curve.losses},
        }

    def save(self, path: Path) -> None:
        """Write a checkpoint; an existing one is replaced only once the new one is complete."""
        state = {
            "workload": self.workload.name,
            "steps": self.steps,
            "done": self.done,
            "seed": self.seed,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "curve": {"steps": self.curve.steps, "losses": self.curve.losses},
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + ".partial")
        torch.save(state, partial)
        os.replace(partial, path)

    def resume(self, path: Path) -> None:
        """Continue from a checkpoint of the same workload, seed and length.

        Raises:
            ValueError: The checkpoint is of another run.
        """
        state = torch.load(path)
        given = (self.workload.name, self.seed, self.steps)
        found = (state["workload"], state["seed"], state["steps"])
        if given != found:
            raise ValueError(
                f"{path} is of model, seed and steps {found}, this run of {given}; "
                "pass the same --model, --seed and --steps"
            )
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.done = state["done"]
        self.curve = Curve(**state["curve"])

    def _lr_share(self, step: int) -> float:
        """Linear warm-up, then a cosine down to 5 %."""
        warmup = max(1, round(self.steps * WARMUP_SHARE))
        if step < warmup:
            return (step + 1) / warmup
        progress = min(1.0, (step - warmup) / max(1, self.steps - warmup))
        return FINAL_LR_SHARE + (1 - FINAL_LR_SHARE) * 0.5 * (1 + math.cos(math.pi * progress))


def backward(model: nn.Module, batch: Batch) -> float:
    """Add the clipped gradient of a batch to the parameters' and return the loss."""
    loss = _loss(model, batch)
    loss.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
    return loss.item()


def _loss(model: nn.Module, batch: Batch) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def _to(batch: Batch, dtype: torch.dtype) -> Batch:
    return {key: value.to(dtype) if value.is_floating_point() else value for key, value in batch.items()}
