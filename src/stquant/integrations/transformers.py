"""Hugging Face Trainer: what the optimizer's states cost and do, in the trainer's own logs.

The optimizer itself needs no help: `Trainer(..., optimizer_cls_and_kwargs=(stquant.AdamW, {...}))`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stquant.integrations import scalars
from stquant.integrations.extras import needs
from stquant.report.runlog import RunLog

with needs("transformers", "stquant[trainers]"):
    from transformers import Trainer, TrainerCallback


def log_ledger(trainer: Trainer, run_log: str | Path | None = None) -> None:
    """Add `state_bytes`, `state_bits` and `state_damage` to every entry of a trainer's logs.

    They are the ledger's bytes (residuals included), true bits per state element, and the error of
    the step that adaptive policies expected at their last decision; the last is left out before the
    first decision. They stand in `trainer.state.log_history`, and in what the trainer reports to,
    such as TensorBoard. Each process of a distributed run counts what its own rank holds.

    Args:
        trainer: The trainer, before `train()`; training with an optimizer that is none of this
            library raises `ValueError` when it begins.
        run_log: A file for the run log (`stquant.report.runlog`), with the logged losses; written by
            the first process. A run that resumes continues it.
    """
    # First, so that those who report the logs, which the trainer put there itself, see the numbers.
    trainer.callback_handler.callbacks.insert(0, _LedgerCallback(run_log))


class _LedgerCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not typed for mypy
    def __init__(self, run_log: str | Path | None) -> None:
        self._run_log = None if run_log is None else RunLog(run_log)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._optimizer = scalars.unwrap(kwargs["optimizer"])
        self._writes = self._run_log is not None and state.is_world_process_zero
        if self._run_log is not None and self._writes:
            self._run_log.close()  # of a training that was interrupted
            self._run_log.attach(self._optimizer)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        if self._run_log is not None and self._writes and "loss" in logs:
            self._run_log.loss(state.global_step, logs["loss"])
        found = scalars.of_optimizer(self._optimizer)
        for entry in (logs, state.log_history[-1]):
            entry |= found

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._writes = False
        if self._run_log is not None:
            self._run_log.close()
