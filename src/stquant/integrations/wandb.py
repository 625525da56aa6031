"""Weights & Biases: the numbers of an optimizer or of a run log as metrics of a run."""

from __future__ import annotations

from stquant.integrations.extras import needs
from stquant.integrations.scalars import Scalars
from stquant.integrations.writers import PREFIX, Writer

with needs("wandb", "stquant[writers]"):
    import wandb


class WandbWriter(Writer):
    """Logs metrics named `stquant/...` over `stquant/step`, the optimizer's own count of steps.

    The run's count is left to the training loop: numbers join the row that the loop writes next, and
    end a row of their own only if the loop wrote none since the last.

    ```python
    run = wandb.init(project="...")
    with WandbWriter(run).attach(optimizer):
        ...  # train; finishing the run stays with who began it
    ```

    Args:
        run: The run; `wandb.init(mode="offline")` needs no network.
        states: Whether to log the bits of every state, too.
    """

    def __init__(self, run: wandb.Run, states: bool = False) -> None:
        super().__init__(states)
        self._run = run
        self._row: int | None = None
        run.define_metric(f"{PREFIX}step")
        run.define_metric(f"{PREFIX}*", step_metric=f"{PREFIX}step")

    def _put(self, step: int, found: Scalars) -> None:
        self._flush()
        self._run.log({**found, f"{PREFIX}step": step}, commit=False)
        self._row = self._run.step

    def _flush(self) -> None:
        if self._row == self._run.step:
            self._run.log({}, commit=True)
        self._row = None
