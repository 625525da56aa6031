"""TensorBoard: the numbers of an optimizer or of a run log as scalars."""

from __future__ import annotations

from pathlib import Path

from stquant.integrations.extras import needs
from stquant.integrations.scalars import Scalars
from stquant.integrations.writers import Writer

with needs("tensorboard", "stquant[writers]"):
    from torch.utils.tensorboard import SummaryWriter


class TensorBoardWriter(Writer):
    """Writes scalars named `stquant/...` for TensorBoard.

    ```python
    with TensorBoardWriter("runs/a").attach(optimizer):
        ...  # train
    TensorBoardWriter("runs/b").write(runlog.read("run.jsonl")).close()
    ```

    Args:
        target: A folder, or a `SummaryWriter` that is in use already; closing leaves that open.
        states: Whether to write the bits of every state, too.
    """

    def __init__(self, target: str | Path | SummaryWriter, states: bool = False) -> None:
        super().__init__(states)
        self._owned = not isinstance(target, SummaryWriter)
        self._writer = target if isinstance(target, SummaryWriter) else SummaryWriter(str(target))

    def _put(self, step: int, found: Scalars) -> None:
        for name, value in found.items():
            self._writer.add_scalar(name, value, step)

    def _flush(self) -> None:
        if self._owned:
            self._writer.close()
        else:
            self._writer.flush()
