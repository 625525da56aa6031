"""`stquant inspect`: what the checkpoint of an optimizer holds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from stquant.cli import console, files
from stquant.report import inspection
from stquant.report.inspection import Inspection


def inspect(
    checkpoint: Annotated[
        Path,
        typer.Argument(help="A file of torch.save, or a folder of torch.distributed.checkpoint from a trusted source."),
    ],
    entry: Annotated[str, typer.Option(help="Where it has the optimizer, e.g. optimizer; found if there is one.")] = "",
    states: Annotated[bool, typer.Option("--states", help="List every state of every parameter.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Show policy, formats, bytes and steps of a checkpoint; exit with 1 if it would not load."""
    with console.plain_errors():
        where, saved = files.read_optimizer(checkpoint, entry)
        found = inspection.inspect(saved)
    if json:
        console.print_json({"file": str(checkpoint), "entry": where, **found.to_dict()})
    else:
        _print(f"{checkpoint}{f', entry {where}' if where else ''}", found, states)
    if found.findings:
        raise typer.Exit(1)


def _print(title: str, found: Inspection, states: bool) -> None:
    _say(f"{title}: optimizer of {found.kind}")
    for group in found.groups:
        shown = ", ".join(f"{name} {value}" for name, value in group.items() if name != "parameters")
        _say(f"group of {group['parameters']} parameters: {shown}")
    if found.steps is not None:
        low, high = found.steps
        _say(f"{low} steps taken" if low == high else f"{low} to {high} steps taken")
    if found.stateless:
        _say(f"{found.stateless} parameters have no state")
    if states:
        _say(str(found.ledger))
    else:
        _say_kinds(found)
    for finding in found.findings:
        _say(f"finding: {finding}")


def _say_kinds(found: Inspection) -> None:
    table = Table(box=None, pad_edge=False)
    for column in ("state", "format"):
        table.add_column(column, no_wrap=True)
    for column in ("tensors", "elements", "bits", "bytes"):
        table.add_column(column, justify="right", no_wrap=True)
    for kind in found.kinds():
        table.add_row(*_cells(kind))
    console.out.print(table)
    ledger = found.ledger
    _say(
        f"{ledger.bytes:,} bytes in a running optimizer: {ledger.bytes_per_parameter:.3f} per parameter, "
        f"{ledger.bits:.3f} true bits per state element"
    )


def _cells(kind: dict[str, Any]) -> list[str]:
    bits = f"{kind['bits']:.3f}" if kind["elements"] else ""
    sizes = [f"{kind['elements']:,}", bits, f"{kind['bytes']:,}"]
    return [kind["state"], kind["format"], str(kind["tensors"]), *sizes]


def _say(text: str) -> None:
    console.out.print(text, markup=False, highlight=False, soft_wrap=True)
