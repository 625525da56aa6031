"""Recorded measurements, and how they are written as tables."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; the first column is text, the others are numbers."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (head, rule, *rows))


def load(name: str) -> dict[str, Any]:
    """Return a recorded measurement."""
    loaded: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return loaded


def exists(name: str) -> bool:
    """Whether a measurement was recorded."""
    return (RESULTS / f"{name}.json").exists()
