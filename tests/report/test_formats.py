"""The catalogue as a table, and the document made from it."""

from __future__ import annotations

import pytest

from stquant.report.formats import describe
from tests.cases import PACKED

ROWS = {row["name"]: row for row in describe()}


def test_every_packed_format_has_a_row() -> None:
    assert list(ROWS) == [format.name for format in PACKED]


def test_bits_and_levels() -> None:
    assert (ROWS["mulaw4"]["true_bits"], ROWS["mulaw4"]["levels"]) == (4.25, 15)
    assert (ROWS["dynamic2"]["true_bits"], ROWS["dynamic2"]["levels"]) == (2.25, 4)
    assert (ROWS["log0"]["true_bits"], ROWS["log0"]["levels"]) == (0.25, 1)


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
