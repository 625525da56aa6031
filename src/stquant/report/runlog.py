"""The run log: one JSON object per line, written while a run goes on.

The first line says what runs; each later one is a decision of the optimizer or a training loss.
Every line is handed to the operating system as soon as it is known, so a killed run loses at most
the line that was being written, which the reader leaves out. A run that continues from a
checkpoint continues its file: lines of steps after the checkpoint are removed, since the run
takes these steps again.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from torch.optim import Optimizer

from stquant.checkpoint.restore import named
from stquant.policy.decision import Decision
from stquant.report.record import conditions

SCHEMA = 1
"""Version of the file; raised when a reader of an earlier one would misread it."""

DIGITS = 7
"""Significant digits of the numbers in the file."""


@dataclass(frozen=True, slots=True)
class Log:
    """What a run log holds.

    Attributes:
        header: The first line: `optimizer`, `policies`, `parameters` (shapes by name), `conditions`.
        decisions: In the order in which they were taken; several at one step if several policies adapt.
        losses: Step and training loss.
    """

    header: Mapping[str, Any]
    decisions: tuple[Decision, ...]
    losses: tuple[tuple[int, float], ...]


def read(path: str | Path) -> Log:
    """Read a run log; a last line that was cut off is left out.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is not a run log, a line is damaged, or a newer version wrote it.
    """
    path = Path(path)
    header, *lines = _lines(path)
    decisions, losses = [], []
    for number, line in enumerate(lines, start=2):
        try:
            if line["kind"] == "decision":
                decisions.append(Decision.from_dict(_numbers(line["decision"])))
            elif line["kind"] == "loss":
                losses.append((line["step"], math.nan if line["loss"] is None else line["loss"]))
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: not a {line.get('kind')} of a run log ({error!r})") from error
    return Log(header, tuple(decisions), tuple(losses))


class RunLog:
    """Writes the decisions of an optimizer, and the losses that it is told, to a file.

    ```python
    with RunLog("run.jsonl").attach(optimizer) as log:
        ...  # train; load a checkpoint before attaching
        log.loss(step, loss.item())
    ```

    With several processes, attach on one of them.

    Args:
        path: The file. One that exists is continued.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file: TextIO | None = None
        self._hook: Any = None
        self._written: dict[str, int] = {}
        self._last_loss = 0

    def attach(self, optimizer: Optimizer) -> RunLog:
        """Open the file, and write every decision that the optimizer takes from now on.

        Args:
            optimizer: Any optimizer; one without adaptive policies takes no decisions.

        Returns:
            This log, for a `with` statement.

        Raises:
            ValueError: The file is of another run: of other parameters, or the optimizer has taken
                no step yet and the file has; nothing was changed.
            RuntimeError: The log is attached already.
        """
        if self._file is not None:
            raise RuntimeError(f"{self.path} is being written; close it before attaching it again")
        header, step = _header(optimizer), steps_taken(optimizer)
        kept = self._continued(header, step) if self.path.exists() and self.path.stat().st_size else [header]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _rewrite(self.path, kept)
        for line in kept:
            if line["kind"] == "decision":
                self._written[_pool(Decision.from_dict(_numbers(line["decision"])))] = line["step"]
            elif line["kind"] == "loss":
                self._last_loss = line["step"]
        self._file = self.path.open("a", encoding="utf-8")
        self._hook = optimizer.register_step_post_hook(self._after_step)
        return self

    def loss(self, step: int, loss: float) -> None:
        """Write the training loss of a step; one that the file has already is left out.

        Raises:
            RuntimeError: The log is not attached.
        """
        if step > self._last_loss:
            self._last_loss = step
            self._write({"kind": "loss", "step": step, "loss": loss})

    def close(self) -> None:
        """Stop writing and close the file."""
        if self._file is not None:
            self._hook.remove()
            self._file.close()
            self._file = None

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _continued(self, header: Mapping[str, Any], step: int) -> list[dict[str, Any]]:
        """Lines of the present file that stay valid for an optimizer at `step`."""
        first, *lines = _lines(self.path)
        for what in ("optimizer", "parameters"):
            if first.get(what) != header[what]:
                raise ValueError(f"{self.path} is the log of a run with other {what}; choose another file")
        if step == 0 and lines:
            last = max(line["step"] for line in lines)
            raise ValueError(
                f"{self.path} holds a run up to step {last}, but this optimizer has taken no step; "
                "load its checkpoint before attaching the log, or choose another file"
            )
        return [first, *(line for line in lines if line["step"] <= step)]

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        for decision in _decisions(optimizer):
            pool = _pool(decision)
            if decision.step > self._written.get(pool, 0):
                self._written[pool] = decision.step
                self._write({"kind": "decision", "step": decision.step, "decision": decision.to_dict()})

    def _write(self, line: Mapping[str, Any]) -> None:
        if self._file is None:
            raise RuntimeError(f"{self.path} is not attached to an optimizer; call attach() first")
        self._file.write(_dump(line))
        self._file.flush()


def _header(optimizer: Optimizer) -> dict[str, Any]:
    return {
        "kind": "run",
        "schema": SCHEMA,
        "optimizer": type(optimizer).__name__,
        "parameters": {entry.name: list(entry.param.shape) for entry in named(optimizer.param_groups)},
        "conditions": conditions(),
    }


def steps_taken(optimizer: Optimizer) -> int:
    """Return how many steps the optimizer has taken."""
    return max((int(state["step"]) for state in optimizer.state.values() if "step" in state), default=0)


def _decisions(optimizer: Optimizer) -> tuple[Decision, ...]:
    found: tuple[Decision, ...] = getattr(optimizer, "decisions", tuple)()
    return found


def _pool(decision: Decision) -> str:
    """Who decides: a parameter has one policy, so the first of them tells."""
    return decision.states[0].parameter


def _lines(path: Path) -> list[dict[str, Any]]:
    """Return the header and all complete lines."""
    text = path.read_text(encoding="utf-8", errors="replace")
    lines = list(_parse(path, text[: text.rfind("\n") + 1].splitlines()))
    if not lines or lines[0].get("kind") != "run":
        raise ValueError(f"{path} is not a run log: its first line does not say what runs")
    if lines[0].get("schema") != SCHEMA:
        raise ValueError(
            f"{path} is a run log of version {lines[0].get('schema')!r}; this version of stquant reads {SCHEMA}"
        )
    return lines


def _parse(path: Path, lines: list[str]) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(lines, start=1):
        try:
            found = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: not JSON ({error}); is this a run log?") from error
        if (
            not isinstance(found, dict)
            or "kind" not in found
            or (number > 1 and not isinstance(found.get("step"), int))
        ):
            raise ValueError(f"{path}, line {number}: not a line of a run log")
        yield found


def _rewrite(path: Path, lines: list[dict[str, Any]]) -> None:
    """Replace the file as a whole, once the new one is complete."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text("".join(map(_dump, lines)), encoding="utf-8")
    os.replace(partial, path)


def _dump(line: Mapping[str, Any]) -> str:
    return json.dumps(_plain(line), separators=(",", ":"), allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    """Shorten numbers to the file's digits; JSON knows no NaN and no infinity, they become null."""
    if isinstance(value, torch.Tensor):
        value = value.item()
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value


def _numbers(decision: Mapping[str, Any]) -> dict[str, Any]:
    """Undo `_plain` where a number must stand: null is a number that was not finite."""
    states = [
        {
            **state,
            **{name: _number(state[name]) for name in ("predicted", "measured")},
            "factors": {name: _number(value) for name, value in state["factors"].items()},
        }
        for state in decision["states"]
    ]
    return {**decision, "moved": _number(decision["moved"]), "states": states}


def _number(value: float | None) -> float:
    return math.nan if value is None else value
