"""The few numbers that trainers and trackers show: bytes, bits and damage of an optimizer's states.

Data only; the other files of this folder bring them to where a user looks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch.optim import Optimizer

from stquant.optim.base import PackedOptimizer
from stquant.policy.decision import Decision
from stquant.report import decisions
from stquant.report.runlog import Log

Scalars = dict[str, float]
"""Numbers by name."""


def unwrap(optimizer: Any) -> PackedOptimizer:
    """Return the optimizer of this library inside of wrappers such as Accelerate's.

    Raises:
        ValueError: There is none.
    """
    inner = optimizer
    while not isinstance(inner, PackedOptimizer):
        if not hasattr(inner, "optimizer"):
            raise ValueError(
                f"the optimizer is {type(inner).__module__}.{type(inner).__name__}, which has no ledger; "
                "allowed are those of stquant, for example stquant.AdamW"
            )
        inner = inner.optimizer
    return inner


def of_optimizer(optimizer: Optimizer) -> Scalars:
    """Return what the states cost now, and the damage expected of their formats.

    Returns:
        `of_ledger`, and `state_damage`, the `damage` of `of_decisions`, once an adaptive policy has decided.
    """
    taken = unwrap(optimizer).decisions()
    return of_ledger(optimizer) | ({"state_damage": of_decisions(taken)["damage"]} if taken else {})


def of_ledger(optimizer: Optimizer) -> Scalars:
    """Return `state_bytes` and `state_bits`: what this rank holds, residuals included, and true bits per element."""
    ledger = unwrap(optimizer).ledger()
    return {"state_bytes": ledger.bytes, "state_bits": ledger.bits}


def of_decisions(taken: Sequence[Decision]) -> Scalars:
    """Return what adaptive policies hold after their last decisions.

    Args:
        taken: The last decision of each policy, at least one.

    Returns:
        `bytes` that count against the budgets; their `budget`, if every policy has one; `bits`, the
        average true bits of the states that adapt; `damage`, the squared error expected in the
        step of the weights, relative to the squared step, of the policy with the largest;
        `damage_measured`, likewise in the formats before, if all was measured; `changed`, the number
        of states that got another format in the newest of these decisions' steps.
    """
    newest = max(decision.step for decision in taken)
    states = [state for decision in taken for state in decision.states]
    budgets = [decision.budget for decision in taken if decision.budget is not None]
    measured = [found for found in map(decisions.measured, taken) if found is not None]
    scalars: Scalars = {"bytes": sum(decision.bytes for decision in taken)}
    if len(budgets) == len(taken):
        scalars["budget"] = sum(budgets)
    scalars["bits"] = 8 * sum(state.new_bytes for state in states) / max(1, sum(state.elements for state in states))
    scalars["damage"] = max(map(decisions.predicted, taken))
    if len(measured) == len(taken):
        scalars["damage_measured"] = max(measured)
    scalars["changed"] = sum(
        state.old != state.new for decision in taken if decision.step == newest for state in decision.states
    )
    return scalars


def of_states(taken: Sequence[Decision]) -> Scalars:
    """Return the true bits of each state that adapts, as `bits/<parameter>/<state>`."""
    return {
        f"bits/{state.parameter}/{state.state}": 8 * state.new_bytes / state.elements
        for decision in taken
        for state in decision.states
        if state.elements
    }


def of_log(log: Log, states: bool = False) -> Iterator[tuple[int, Scalars]]:
    """Yield the steps of a run log, in order, with their numbers: `of_decisions`, and `loss`.

    Args:
        log: The log.
        states: Whether to add `of_states`.
    """
    losses = dict(log.losses)
    last: dict[str, Decision] = {}
    taken: dict[int, list[Decision]] = {}
    for decision in log.decisions:
        taken.setdefault(decision.step, []).append(decision)
    for step in sorted(losses.keys() | taken.keys()):
        found: Scalars = {"loss": losses[step]} if step in losses else {}
        if step in taken:
            last |= {decision.states[0].parameter: decision for decision in taken[step]}
            found |= of_decisions(tuple(last.values())) | (of_states(taken[step]) if states else {})
        yield step, found
