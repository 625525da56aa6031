"""What a decision was: the record that reports and run logs are made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class StateDecision:
    """One state in a decision.

    Attributes:
        parameter: The parameter's name.
        state: The state's name.
        elements: Elements of the state.
        old: Name of the format before.
        new: Name of the format after.
        old_bytes: Bytes before.
        new_bytes: Bytes after.
        predicted: Damage predicted in the new format: the sum of squared errors that it makes in
            the step of the weight, over the whole tensor, in units of the largest learning rate.
        measured: Damage measured in the old format in this step, in the same unit.
        factors: Factors by name, see `policy.factors`.
        why: Why the format changed or did not.
    """

    parameter: str
    state: str
    elements: int
    old: str
    new: str
    old_bytes: int
    new_bytes: int
    predicted: float
    measured: float
    factors: Mapping[str, float]
    why: str

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> StateDecision:
        """Return what `asdict` was made of."""
        return cls(**data)


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision about the states of one budget.

    Attributes:
        step: Largest step of the parameters that were measured.
        policy: The policy, as it prints.
        budget: Bytes allowed; None if the policy limits the error.
        bytes: Bytes that count against it after the decision.
        moved: Sum of squared steps of the weights over all tensors that were measured: damages
            are relative to it.
        states: The states, in the order of the parameters.
    """

    step: int
    policy: str
    budget: int | None
    bytes: int
    moved: float
    states: tuple[StateDecision, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers, strings, lists and dicts."""
        return {**asdict(self), "states": [asdict(state) for state in self.states]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Decision:
        """Return what `to_dict` was made of."""
        return cls(**{**data, "states": tuple(StateDecision.from_dict(state) for state in data["states"])})
