"""Lightning: what the optimizer's states cost and do, in the logs of its Trainer.

The optimizer itself needs no help: `configure_optimizers` returns it as it would return torch's.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stquant.integrations import scalars
from stquant.integrations.extras import needs
from stquant.optim.base import PackedOptimizer
from stquant.report.runlog import RunLog

with needs("lightning", "stquant[trainers]"):
    from lightning.pytorch import Callback, LightningModule, Trainer


class LedgerCallback(Callback):  # type: ignore[misc]  # lightning is not typed for mypy
    """Logs `state_bytes`, `state_bits` and `state_damage` every `log_every_n_steps` steps.

    They are the ledger's bytes (residuals included) and true bits per state element of the logging
    process's own rank, and the error of the step that adaptive policies expected at their last
    decision; the last is left out before the first decision.

    ```python
    trainer = Trainer(callbacks=[LedgerCallback(run_log="run.jsonl")])
    ```

    Args:
        run_log: A file for the run log (`stquant.report.runlog`), with the losses of the logged
            steps; written by the first process. A run that resumes continues it.
    """

    def __init__(self, run_log: str | Path | None = None) -> None:
        self._run_log = None if run_log is None else RunLog(run_log)
        self._optimizer: PackedOptimizer | None = None
        self._logged = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the optimizer, with the states of a checkpoint that is resumed.

        Raises:
            ValueError: Not exactly one optimizer of the module is of this library.
        """
        packed = [optimizer for optimizer in trainer.optimizers if isinstance(optimizer, PackedOptimizer)]
        if len(packed) != 1:
            raise ValueError(
                f"the module has {len(packed)} optimizers of stquant ({len(trainer.optimizers)} in all); "
                "LedgerCallback logs exactly one, for example stquant.AdamW"
            )
        self._optimizer, self._logged = packed[0], trainer.global_step
        if self._run_log is not None and trainer.is_global_zero:
            self._run_log.close()  # of a training that was interrupted
            self._run_log.attach(self._optimizer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log, if the step is one that the trainer logs."""
        step, every = trainer.global_step, trainer.log_every_n_steps
        if self._optimizer is None or step == self._logged or not every or step % every:
            return
        self._logged = step
        pl_module.log_dict(scalars.of_optimizer(self._optimizer))
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if self._run_log is not None and trainer.is_global_zero and loss is not None:
            self._run_log.loss(step, float(loss))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Close the run log."""
        if self._run_log is not None:
            self._run_log.close()
