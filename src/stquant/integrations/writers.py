"""What writers for trackers of experiments have in common: when something is written, and what.

A writer follows an optimizer while it trains, or writes a run log that is there already. The files
for the single trackers say where the numbers go.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch.optim import Optimizer
from typing_extensions import Self

from stquant.integrations import scalars
from stquant.integrations.scalars import Scalars
from stquant.policy.decision import Decision
from stquant.report.runlog import Log, steps_taken

PREFIX = "stquant/"
"""Begins the name of every number."""


class Writer(ABC):
    """Writes the numbers of an optimizer or of a run log.

    Args:
        states: Whether to write the bits of every state, too: two numbers for each tensor.
    """

    def __init__(self, states: bool = False) -> None:
        self._states = states
        self._hook: Any = None
        self._last: int | None = None

    def attach(self, optimizer: Optimizer) -> Self:
        """Write after the next step, and after every decision that the optimizer takes from now on.

        With several processes, attach on one of them. After a resume, load the checkpoint first.

        Args:
            optimizer: One of this library, also inside of a wrapper such as Accelerate's.

        Returns:
            This writer, for a `with` statement.

        Raises:
            ValueError: The optimizer is another library's.
            RuntimeError: The writer is attached already.
        """
        if self._hook is not None:
            raise RuntimeError("this writer is attached to an optimizer; close it, or make another one")
        self._hook = scalars.unwrap(optimizer).register_step_post_hook(self._after_step)
        return self

    def write(self, log: Log) -> Self:
        """Write a run log: its decisions and losses, each at its step.

        Args:
            log: What `stquant.report.runlog.read` returns.
        """
        for step, found in scalars.of_log(log, self._states):
            self._put(step, _prefixed(found))
        return self

    def close(self) -> None:
        """Stop following the optimizer, and hand on what was written."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        self._flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        taken: tuple[Decision, ...] = scalars.unwrap(optimizer).decisions()
        newest = max((decision.step for decision in taken), default=0)
        if self._last is not None and newest <= self._last:
            return
        self._last = steps_taken(optimizer)
        found = scalars.of_ledger(optimizer)
        if taken:
            found |= scalars.of_decisions(taken) | (scalars.of_states(taken) if self._states else {})
        self._put(self._last, _prefixed(found))

    @abstractmethod
    def _put(self, step: int, found: Scalars) -> None:
        """Write numbers of a step."""

    @abstractmethod
    def _flush(self) -> None:
        """Hand on what was written."""


def _prefixed(found: Scalars) -> Scalars:
    return {PREFIX + name: value for name, value in found.items()}
