"""Policies that users write: what an optimizer makes of them, and what their files need."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

import stquant
from stquant.checkpoint.schema import read_group
from stquant.policy import policies
from stquant.policy.facts import Choice, ParameterFacts
from tests.optim.helpers import gradients, parameters, run

SHAPES = [(64, 128), (256, 128), (130,)]


class BySize:
    def __init__(self, elements: int) -> None:
        self.elements = elements
        self.small, self.large = stquant.Fixed(bits=8), stquant.Fixed(bits=4)

    def choose(self, facts: ParameterFacts, states: Mapping[str, bool]) -> dict[str, Choice]:
        return (self.large if math.prod(facts.shape) > self.elements else self.small).choose(facts, states)

    def check(self, states: Mapping[str, bool]) -> None:
        self.small.check(states)

    def formats_of(self, states: Mapping[str, bool]) -> Any:
        return self.small.formats_of(states)

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "by size", "elements": self.elements}


@pytest.fixture(autouse=True)
def _kinds(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test registers is forgotten after it."""
    monkeypatch.setattr(policies, "_KINDS", dict(policies._KINDS))
    read_group.cache_clear()
    yield
    read_group.cache_clear()


def optimizer(policy: Any = "adaptive") -> Any:
    return stquant.AdamW(parameters(SHAPES), policy=policy)


def trained(one: Any, steps: range) -> list[torch.Tensor]:
    params = [p for group in one.param_groups for p in group["params"]]
    run(one, params, gradients(params, len(steps)))
    return [p.detach().clone() for p in params]


def test_a_policy_of_ones_own_chooses_and_its_files_load() -> None:
    stquant.register_policy("by size", BySize)
    first = optimizer(BySize(10_000))
    trained(first, range(2))
    formats = [row.format for row in first.ledger().rows if row.state == "exp_avg"]
    assert formats == ["mulaw8", "mulaw4", "fp32"]
    other = optimizer()
    other.load_state_dict(first.state_dict())
    assert other.ledger().rows == first.ledger().rows
    assert other._policy(other.param_groups[0]).elements == 10_000
    with torch.no_grad():
        for mine, its in zip(other.param_groups[0]["params"], first.param_groups[0]["params"], strict=True):
            mine.copy_(its)
    for mine, its in zip(trained(other, range(2, 4)), trained(first, range(2, 4)), strict=True):
        assert torch.equal(mine, its)


def test_a_file_whose_policy_is_not_registered_changes_nothing() -> None:
    policies.register_policy("by size", BySize)
    first = optimizer(BySize(10_000))
    trained(first, range(1))
    saved = first.state_dict()
    del policies._KINDS["by size"]
    read_group.cache_clear()
    other = optimizer()
    with pytest.raises(stquant.CheckpointError, match="import the module that registers it"):
        other.load_state_dict(saved)
    assert not other.state


def test_what_is_no_policy_raises() -> None:
    with pytest.raises(ValueError, match="of a kind that is not registered"):
        optimizer(BySize(1))
    with pytest.raises(ValueError, match="kind 'fixed' is taken"):
        stquant.register_policy("fixed", BySize)

    class Half:
        def choose(self, facts: Any, states: Any) -> Any: ...

    with pytest.raises(TypeError, match="lacks check, formats_of, to_dict"):
        optimizer(Half())
