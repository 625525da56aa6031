"""The catalogue as a table, and the document made from it."""

from __future__ import annotations

import pytest

from stquant.report.formats import describe
from tests.cases import PACKED, RECIPES

RECIPE_NAMES = [format.name for format in RECIPES]
ROWS = {row["name"]: row for row in describe()}


def test_every_packed_format_has_a_row() -> None:
    assert list(ROWS) == [format.name for format in PACKED + RECIPES]


def test_bits_and_levels() -> None:
    assert (ROWS["mulaw4"]["true_bits"], ROWS["mulaw4"]["levels"]) == (4.25, 15)
    assert (ROWS["dynamic2"]["true_bits"], ROWS["dynamic2"]["levels"]) == (2.25, 4)
    assert (ROWS["log0"]["true_bits"], ROWS["log0"]["levels"]) == (0.25, 1)


def test_recipes_cost_what_they_publish() -> None:
    costs = {name: (ROWS[name]["block"], ROWS[name]["true_bits"], ROWS[name]["levels"]) for name in RECIPE_NAMES}
    assert costs == {
        "dynamic8": (256, 8.125, 256),
        "udynamic8": (256, 8.125, 256),
        "dynamic4": (128, 4.25, 16),
        "linear4": (128, 4.25, 16),
        "nf4": (128, 4.25, 16),
        "softsign8": (32, 8.5, 255),
        "sqrt8": (32, 8.5, 256),
        "solo2": (128, 2.5, 4),
    }


def test_more_bits_make_less_error() -> None:
    for family in (("dynamic0", "dynamic2", "dynamic3", "mulaw4", "mulaw5", "mulaw6", "mulaw8"),):
        errors = [ROWS[name]["rms_error"] for name in family]
        assert errors == sorted(errors, reverse=True)
    nearest = [ROWS[f"log{bits}-nearest"]["rms_error"] for bits in (2, 3, 4)]
    assert nearest == sorted(nearest, reverse=True)


def test_stochastic_rounding_is_biased_in_value_only_over_two_octaves() -> None:
    assert ROWS["log1"]["value_bias"] == pytest.approx(0.25, abs=1e-3)
    assert ROWS["log3"]["value_bias"] < 1e-6
    assert ROWS["log1-nearest"]["value_bias"] is None
