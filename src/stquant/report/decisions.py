"""The last decisions of an optimizer as a table: what was measured, what changed, and why."""

from __future__ import annotations

import io
from typing import Any

from stquant.policy.decision import Decision, StateDecision


class Decisions(tuple[Decision, ...]):
    """The last decision of each adaptive policy of an optimizer; `str()` of it is a table."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the decisions as plain numbers, strings, lists and dicts."""
        return {"decisions": [decision.to_dict() for decision in self]}

    def __str__(self) -> str:
        if not self:
            return "no decision yet: nothing was measured since the start or the last load, or no policy is adaptive"
        return "\n\n".join(map(_render, self))


def summary(decision: Decision) -> str:
    """Return one line: when, how many bytes of how many, what changed, and the damage."""
    held = f"{decision.bytes:,} bytes" + ("" if decision.budget is None else f" of {decision.budget:,}")
    changed = sum(state.old != state.new for state in decision.states)
    return (
        f"step {decision.step:,}, {decision.policy}: {held}, {changed} of {len(decision.states)} states changed, "
        f"error of the step expected {share(predicted(decision))}"
    )


def predicted(decision: Decision) -> float:
    """Damage that the new formats are expected to make, relative to the squared step of the weights."""
    return relative(sum(state.predicted for state in decision.states), decision)


def measured(decision: Decision) -> float | None:
    """Damage that the old formats made, likewise; None if a state was not measured in this step."""
    if not all(state.factors for state in decision.states):
        return None
    return relative(sum(state.measured for state in decision.states), decision)


def relative(damage: float, decision: Decision) -> float:
    """Return a damage relative to the squared step of the weights; 0 if nothing moved."""
    return damage / decision.moved if decision.moved > 0.0 else 0.0


def share(value: float | None) -> str:
    """Return a share in percent, to two digits."""
    return "not measured" if value is None else f"{100 * value:.2g} %"


def _render(decision: Decision) -> str:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in ("parameter", "state", "format", "bytes", "expected", "measured", "why"):
        right = column in ("bytes", "expected", "measured")
        table.add_column(column, justify="right" if right else "left", no_wrap=True)
    for state in decision.states:
        table.add_row(*_cells(state, decision))
    text = io.StringIO()
    Console(file=text, width=200, color_system=None).print(table)
    return "\n".join([summary(decision), *(line.rstrip() for line in text.getvalue().splitlines())])


def _cells(state: StateDecision, decision: Decision) -> list[str]:
    return [
        state.parameter,
        state.state,
        state.new if state.old == state.new else f"{state.old} to {state.new}",
        f"{state.new_bytes:,}",
        share(relative(state.predicted, decision)),
        share(relative(state.measured, decision) if state.factors else None),
        state.why,
    ]
