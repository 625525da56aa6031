"""`stquant formats`: the catalogue."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from stquant.cli import console
from stquant.report.formats import describe


def formats(json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List the formats with their bits, levels and errors."""
    rows = describe()
    if json:
        console.print_json(rows)
        return
    table = Table(box=None, pad_edge=False)
    for column in rows[0]:
        table.add_column(column.replace("_", " "), justify="left" if column in ("name", "state") else "right")
    for row in rows:
        table.add_row(*(_show(value) for value in row.values()))
    console.out.print(table)


def _show(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    return "" if value is None else str(value)
