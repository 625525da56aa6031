"""Adaptive policies as data: arguments, limits, ladders, and what stands in before anything is measured."""

from __future__ import annotations

import pytest
import torch

from stquant import Budget, Tolerance
from stquant.codecs import catalog
from stquant.kernels.ops import AdamRule, Item
from stquant.kernels.reference import adam_step_, measure
from stquant.kernels.reference.measurement import energies, names
from stquant.policy import policies
from stquant.policy.budget import PRIOR, Adaptive, Holdings, rung
from stquant.policy.facts import ParameterFacts
from stquant.storage.packed import PackedState

POLICIES = [
    Adaptive(),
    Adaptive(every=10, block=64, flat=True),
    Budget(bits=2.5),
    Budget(bytes="6GiB", every=7),
    Budget(bytes=10**9),
    Budget(bytes_per_param=0.5, block=256),
    Tolerance(0.01),
    Tolerance(0.5, every=1),
]


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_a_policy_survives_its_file_form(policy: policies.Policy) -> None:
    again = policies.from_dict(policy.to_dict())
    assert again == policy
    assert repr(again) == repr(policy)
    assert hash(again) == hash(policy)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "give one of bits, bytes and bytes_per_param"),
        ({"bits": 2, "bytes": 100}, "give one of bits, bytes and bytes_per_param"),
        ({"bits": 0}, "not a positive number"),
        ({"bits": "2"}, "not a positive number"),
        ({"bytes": "6 gigabytes"}, "cannot be read"),
        ({"bytes": -1}, "not a positive number"),
        ({"bytes_per_param": float("nan")}, "not a positive number"),
        ({"bits": 2.0, "every": 0}, "not a number of steps"),
        ({"bits": 2.0, "block": 100}, "not a power of two"),
    ],
    ids=str,
)
def test_wrong_budgets_say_what_is_allowed(arguments: dict, message: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(ValueError, match=message):
        Budget(**arguments)


@pytest.mark.parametrize("error", [0, 1, -0.1, "0.1", True, float("nan")])
def test_wrong_tolerances_say_what_is_allowed(error: object) -> None:
    with pytest.raises(ValueError, match="above 0 and below 1"):
        Tolerance(error)  # type: ignore[arg-type]


@pytest.mark.parametrize(("text", "bytes"), [("1KB", 1000), ("1.5KiB", 1536), ("2 GB", 2 * 10**9), ("3MiB", 3 * 2**20)])
def test_sizes_are_read(text: str, bytes: int) -> None:
    assert Budget(bytes=text).total(Holdings(1, 2, 0, 0, 0, 0)) == bytes


def test_limits_leave_room_for_what_is_not_packed() -> None:
    holdings = Holdings(
        parameters=1000,
        state_elements=2000,
        plain_bytes=100,
        residual_bytes=50,
        compact_bytes=400,
        packed_elements=1600,
    )
    assert Budget(bits=4).limit(holdings) == 1000 - 100
    assert Budget(bytes=1000).limit(holdings) == 1000 - 150
    assert Budget(bytes_per_param=0.5).limit(holdings) == 500 - 150
    assert Adaptive().limit(holdings) == 400 + 1600 // 4 // 8
    assert Tolerance(0.1).limit(holdings) is None
    assert Budget(bits=4).least(holdings, 400) == "bits=2.0"
    assert Budget(bytes=1).least(holdings, 400) == "bytes=550"


def test_ladders_keep_to_widths_that_train() -> None:
    facts, plain = ParameterFacts((64, 128), torch.float32), ParameterFacts((64, 128), torch.float32, prepays=False)
    policy = Budget(bits=3)
    assert [f.bits for f in policy.ladder(facts, True)] == [2, 3, 4, 5, 6, 8]
    assert [f.bits for f in policy.ladder(plain, True)] == [4, 5, 6, 8]
    assert not any(f.prepay for f in policy.ladder(plain, True))
    assert [f.bits for f in policy.ladder(facts, False)] == [0, 1, 2, 3, 4, 5, 6, 8]
    assert [f.bits for f in Adaptive().ladder(facts, False)] == [2, 3, 4, 5, 6, 8]
    assert rung((4, 0), policy.ladder(facts, False), signed=False) == 0
    assert rung((4, 0), policy.ladder(facts, True), signed=True) == 2


def test_decisions_come_every_k_steps_and_early_on() -> None:
    assert [step for step in range(1, 401) if Budget(bits=3).due(step)] == [10, 25, 50, 100, 200, 300, 400]
    assert [step for step in range(1, 9) if Budget(bits=3, every=4).due(step)] == [2, 4, 8]
    assert all(Budget(bits=3, every=1).due(step) for step in range(1, 5))


def test_the_prior_is_what_normal_noise_measures() -> None:
    """Shares of the squared update that each width gets wrong, after the averages have settled."""
    candidates = {
        "exp_avg": tuple(catalog.default_for(bits, True) for bits in PRIOR[True]),
        "exp_avg_sq": tuple(catalog.default_for(bits, False) for bits in PRIOR[False]),
    }
    generator = torch.Generator().manual_seed(0)
    shape, rule = (16, 128), AdamRule(1e-3, (0.9, 0.999), 1e-8, 0.0, True, False, 0)
    param = torch.zeros(shape)
    states = {name: PackedState.encoded(formats[-1], torch.zeros(shape), 128) for name, formats in candidates.items()}
    sums = torch.zeros(len(names(candidates)), dtype=torch.float64)
    for step in range(1, 161):
        item = Item(param, torch.randn(shape, generator=generator), states, None, False, step, 0)
        if step > 60:
            sums += energies(measure([item], rule, candidates))[0]
        adam_step_([item], rule)
    energy = dict(zip(names(candidates), sums.tolist(), strict=True))
    for signed, state in ((True, "exp_avg"), (False, "exp_avg_sq")):
        for format in candidates[state]:
            measured = energy[f"{state}.{format.name}.damage"] / energy["move"]
            # It orders widths until something is measured; a fifth is far below the gaps between widths.
            assert PRIOR[signed][format.bits] == pytest.approx(measured, rel=0.2), (state, format.bits, measured)
