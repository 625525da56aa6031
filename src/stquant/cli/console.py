"""What the commands share: where they print, and how a wrong input ends."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

WIDTH = 120
"""Columns of what goes to a file or a pipe; a terminal has its own."""

out = Console(width=None if sys.stdout.isatty() else WIDTH)
err = Console(stderr=True)

Quiet = Annotated[bool, typer.Option("--quiet", help="Show no progress and no summary; --json still prints.")]
"""The option of commands that take long."""


def bars(figure: str = "loss {task.fields[loss]:.3f}", quiet: bool = False) -> Progress:
    """Return live progress bars on the error stream; nothing is drawn if that is not a terminal.

    Args:
        figure: What stands behind a bar, from the fields of its task.
        quiet: Draw nothing on a terminal, either.
    """
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(figure),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=err,
        disable=quiet or not err.is_terminal,
    )


def print_json(data: Any) -> None:
    """Print data as JSON, whole and uncoloured."""
    typer.echo(json.dumps(data, indent=2))


@contextmanager
def plain_errors() -> Iterator[None]:
    """Turn a wrong input into one line and exit status 2."""
    try:
        yield
    except (ValueError, FileNotFoundError) as error:
        err.print(f"stquant: {error}", style="red", markup=False, highlight=False)
        raise typer.Exit(2) from error
