"""What the commands share: where they print, and how a wrong input ends."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

WIDTH = 120
"""Columns of what goes to a file or a pipe; a terminal has its own."""

out = Console(width=None if sys.stdout.isatty() else WIDTH)
err = Console(stderr=True)


def bars(figure: str = "loss {task.fields[loss]:.3f}") -> Progress:
    """Return live progress bars on the error stream; nothing is drawn if that is not a terminal.

    Args:
        figure: What stands behind a bar, from the fields of its task.
    """
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(figure),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=err,
        disable=not err.is_terminal,
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
