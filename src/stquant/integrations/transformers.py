"""Hugging Face Trainer: what the optimizer's states cost, in the trainer's own logs.

The optimizer itself needs no help: `Trainer(..., optimizer_cls_and_kwargs=(stquant.AdamW, {...}))`.
"""

from __future__ import annotations

from typing import Any

from transformers import Trainer, TrainerCallback

from stquant.optim.base import PackedOptimizer


def log_ledger(trainer: Trainer) -> None:
    """Add `state_bytes` and `state_bits` to every entry of a trainer's logs.

    They are the ledger's bytes (residuals included) and true bits per state element. They stand in
    `trainer.state.log_history`, and in what the trainer reports to, such as TensorBoard. Each
    process of a distributed run counts what its own rank holds.

    Args:
        trainer: The trainer, before `train()`; training with an optimizer that is none of this
            library raises `ValueError` when it begins.
    """
    # First, so that those who report the logs, which the trainer put there itself, see the numbers.
    trainer.callback_handler.callbacks.insert(0, _LedgerCallback())


class _LedgerCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not typed for mypy
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._optimizer = _unwrap(kwargs["optimizer"])

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        ledger = self._optimizer.ledger()
        for entry in (logs, state.log_history[-1]):
            entry |= {"state_bytes": ledger.bytes, "state_bits": ledger.bits}


def _unwrap(optimizer: Any) -> PackedOptimizer:
    """Return the optimizer inside of wrappers such as Accelerate's."""
    while not isinstance(optimizer, PackedOptimizer):
        if not hasattr(optimizer, "optimizer"):
            raise ValueError(
                f"the trainer's optimizer is {type(optimizer).__name__}, which has no ledger; "
                "use for example Trainer(..., optimizer_cls_and_kwargs=(stquant.AdamW, {'lr': 3e-4}))"
            )
        optimizer = optimizer.optimizer
    return optimizer
