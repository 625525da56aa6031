"""Which factors explain measured damage, and whether the certificate tells the truth."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from stquant.jobs import calibration
from stquant.jobs.probes import Probe
from stquant.policy import selection
from stquant.policy.selection import TOLERANCE, Observations, select

RECORD = Path(__file__).parents[2] / "benchmarks" / "results" / "calibration.json"
FRESH = range(10_000, 10_040)
"""Seeds of shuffles that are not those of the permutation test."""

MOST_ABOVE = 7
"""Of 40 shuffles, each above the 95 % quantile with chance 0.05, more than 7 are with chance 0.001."""


def planted(generator: torch.Generator, names: Sequence[str], noise: float, tensors: int = 30) -> list[dict[str, Any]]:
    """Probes in two decisions whose damage is a product of powers of three factors."""
    rows = []
    for decision, tensor in itertools.product(range(2), range(tensors)):
        factors = {name: float(torch.randn((), generator=generator).exp()) for name in names}
        wobble = noise * float(torch.randn((), generator=generator))
        damage = math.exp(5 * decision + wobble) * factors["b"] ** 1.5 * factors["d"] ** -1.0 * factors["f"] ** 0.5
        rows.append({"factors": factors, "damage": damage, "decision": decision, "tensor": tensor})
    return rows


def observed(rows: Sequence[dict[str, Any]]) -> Observations:
    return Observations.of(*([row[key] for row in rows] for key in ("factors", "damage", "decision", "tensor")))


def test_planted_factors_are_found_with_their_powers() -> None:
    found = select(observed(planted(torch.Generator().manual_seed(0), "abcdefgh", noise=0.1)), 3)
    assert found.names == ("b", "d", "f")
    assert found.exponents == pytest.approx((1.5, -1.0, 0.5), abs=0.1)
    assert set(found.certificate.best) == {"b", "d", "f"}
    assert found.certificate.r2 == pytest.approx(found.certificate.best_r2) == found.path[-1]
    assert found.cross_validated > 0.95 > 0.2 > found.by_chance


def test_a_decision_has_its_own_level() -> None:
    """Multiplying all damages of a decision, or a factor in it, changes nothing."""
    rows = planted(torch.Generator().manual_seed(1), "abcdef", noise=0.5)
    scaled = [
        {
            **row,
            "damage": row["damage"] * 7.0 ** row["decision"],
            "factors": {**row["factors"], "a": row["factors"]["a"] * 9},
        }
        for row in rows
    ]
    one, other = (select(observed(these), 2, shuffles=3) for these in (rows, scaled))
    assert one.names == other.names
    assert one.exponents == pytest.approx(other.exponents)
    assert one.cross_validated == pytest.approx(other.cross_validated)


def test_shuffled_damages_are_not_explained() -> None:
    observations = observed(planted(torch.Generator().manual_seed(2), "abcdefgh", noise=0.1))
    limit = selection.by_chance(observations, 3)
    above = [selection.cross_validated(observations.shuffled(seed), 3) > limit for seed in FRESH]
    assert sum(above) <= MOST_ABOVE
    assert selection.cross_validated(observations, 3) > limit


def test_selecting_again_gives_the_same() -> None:
    rows = planted(torch.Generator().manual_seed(3), "abcdef", noise=1.0, tensors=8)
    assert select(observed(rows), 3, shuffles=3) == select(observed(rows), 3, shuffles=3)


@st.composite
def instances(draw: st.DrawFn) -> tuple[Tensor, Tensor, int]:
    """Random factors of every correlation, among them copies of each other, and a damage."""
    probes, count = draw(st.integers(6, 30)), draw(st.integers(2, 7))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    mixed = torch.randn(count, count, generator=generator, dtype=torch.float64) * draw(st.sampled_from([0.0, 0.3, 3.0]))
    factors = torch.randn(probes, count, generator=generator, dtype=torch.float64) @ (torch.eye(count) + mixed)
    if draw(st.booleans()):
        factors[:, -1] = 2 * factors[:, 0]
    damage = factors @ torch.randn(count, generator=generator, dtype=torch.float64)
    return factors, damage + torch.randn(probes, generator=generator, dtype=torch.float64), draw(st.integers(1, 4))


def instance_observed(factors: Tensor, damage: Tensor) -> Observations:
    columns = [{f"f{i}": math.exp(value) for i, value in enumerate(row)} for row in factors.tolist()]
    return Observations.of(columns, damage.exp().tolist(), [0] * len(damage), list(range(len(damage))))


@given(instances())
def test_greedy_is_within_the_bound_of_the_exhaustive_optimum(instance: tuple[Tensor, Tensor, int]) -> None:
    factors, damage, size = instance
    observations = instance_observed(factors, damage)
    chosen = selection.forward(observations.standardised, observations.damage, size).tolist()
    certificate = selection.certify(observations, chosen)
    assert 0.0 <= certificate.gamma <= 1.0
    assert certificate.bound == 1.0 - math.exp(-certificate.gamma)
    assert certificate.best_r2 >= certificate.r2 - TOLERANCE
    assert certificate.r2 >= certificate.bound * certificate.best_r2 - TOLERANCE


@given(instances())
def test_sets_are_worth_what_least_squares_explain(instance: tuple[Tensor, Tensor, int]) -> None:
    """The optimum is found by another way: least squares on every set, one by one."""
    observations = instance_observed(*instance[:2])
    chosen = selection.forward(observations.standardised, observations.damage, instance[2]).tolist()
    certificate = selection.certify(observations, chosen)
    every = [
        selection.explained(observations.standardised[:, list(columns)], observations.damage)
        for columns in itertools.combinations(range(len(observations.names)), len(chosen))
    ]
    assert certificate.best_r2 == pytest.approx(max(every), abs=TOLERANCE)
    assert certificate.r2 == pytest.approx(
        selection.explained(observations.standardised[:, chosen], observations.damage), abs=TOLERANCE
    )


def test_the_first_step_of_forward_selection_is_the_best_single_factor() -> None:
    observations = observed(planted(torch.Generator().manual_seed(4), "abcdefgh", noise=2.0))
    alone = [
        selection.explained(observations.standardised[:, [column]], observations.damage)
        for column in range(len(observations.names))
    ]
    assert selection.forward(observations.standardised, observations.damage, 1).tolist() == [alone.index(max(alone))]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"damage": 0.0}, "a damage is not above 0"),
        ({"damage": 1.0}, "all the same"),
        ({"tensor": 0}, "cross-validation needs 2 or more"),
        ({"factors": "wide"}, "16 factors vary, at most 15 can be compared"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_compared_raises(change: dict[str, Any], message: str) -> None:
    generator = torch.Generator().manual_seed(0)
    wide = change.get("factors") == "wide"
    rows = planted(generator, "abcdefghijklmnop" if wide else "abcdef", noise=1.0)
    with pytest.raises(ValueError, match=message):
        observed(rows if wide else [{**row, **change} for row in rows])


def test_factors_that_do_not_vary_are_left_out() -> None:
    rows = planted(torch.Generator().manual_seed(5), "abcdef", noise=1.0)
    rows = [{**row, "factors": {**row["factors"], "zeros": 0.0}} for row in rows]
    assert "zeros" not in observed(rows).names


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(RECORD.read_text())
    return loaded


QUESTIONS = pytest.mark.parametrize("question", calibration.QUESTIONS)


@QUESTIONS
def test_the_recorded_selections_are_within_their_bound(recorded: dict[str, Any], question: str) -> None:
    selections = recorded["questions"][question]["selections"]
    assert selections.keys() == {"gpt2", "vit", "clip", "all"}
    for found in selections.values():
        certificate = found["certificate"]
        assert certificate["bound"] == 1.0 - math.exp(-certificate["gamma"])
        assert certificate["best_r2"] >= certificate["r2"] - TOLERANCE
        assert certificate["r2"] >= certificate["bound"] * certificate["best_r2"]


@QUESTIONS
def test_the_record_follows_from_its_probes(recorded: dict[str, Any], question: str) -> None:
    probes = [Probe(**row) for row in recorded["probes"] if row["model"] == "vit"]
    observations = calibration.observed(probes, calibration.QUESTIONS[question])
    found = select(observations, calibration.SIZE, shuffles=2)
    written = recorded["questions"][question]["selections"]["vit"]
    assert list(found.names) == written["names"]
    assert found.certificate.r2 == pytest.approx(written["certificate"]["r2"])
    assert found.cross_validated == pytest.approx(written["cross_validated"])


@QUESTIONS
def test_the_recorded_damages_shuffled_are_not_explained(recorded: dict[str, Any], question: str) -> None:
    probes = [Probe(**row) for row in recorded["probes"] if row["model"] == "vit"]
    observations = calibration.observed(probes, calibration.QUESTIONS[question])
    limit = recorded["questions"][question]["selections"]["vit"]["by_chance"]
    above = [selection.cross_validated(observations.shuffled(seed), calibration.SIZE) > limit for seed in FRESH]
    assert sum(above) <= MOST_ABOVE
