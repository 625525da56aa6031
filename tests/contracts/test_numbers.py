"""Every number of the documents' prose that could be measured is generated, or a constant with a reason.

Tables and generated values come from records (`benchmarks/tables.py`, checked elsewhere); code is
no measurement. A number could be measured if it has a decimal point, an exponent or a percent sign.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
CONSTANTS: dict[str, str] = json.loads((ROOT / "benchmarks" / "constants.json").read_text())
"""Definitions, versions and results of a formula in the text, each with what it is."""

NOT_PROSE = re.compile(
    r"<!-- (table|value): .*?<!-- end -->|^ *```.*?^ *```|^    .*?$|`[^`]*`|\]\([^)]*\)", re.DOTALL | re.MULTILINE
)
NUMBER = re.compile(r"(?<![\w.^/])(\d[\d,]*\d|\d)(\.\d+)?(e-?\d+)?( ?%)?(?!\.?\d)")
GENERATED = "Made from the commands themselves."


def measurable(text: str) -> Iterator[str]:
    """Yield the numbers of a text's prose that could be measured."""
    if GENERATED not in text:
        for match in NUMBER.finditer(NOT_PROSE.sub(" ", text)):
            if any(mark in match.group() for mark in ".e%"):
                yield match.group()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_numbers_are_generated_or_constants(document: Path) -> None:
    typed = [number for number in measurable(document.read_text()) if number not in CONSTANTS]
    assert not typed, "generate them with <!-- value: ... -->, or say in benchmarks/constants.json what they are"


def test_constants_are_all_used() -> None:
    used = {number for document in DOCUMENTS for number in measurable(document.read_text())}
    assert set(CONSTANTS) == used


def test_a_typed_number_is_found() -> None:
    text = "saves 93.8 % at `4.5` bits, <!-- value: demo x .2f -->1.25<!-- end --> or 7e-3"
    assert list(measurable(text)) == ["93.8 %", "7e-3"]
