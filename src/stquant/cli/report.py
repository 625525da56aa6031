"""`stquant report`: what the formats of a run did, from its log."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from stquant.cli import console
from stquant.report import figures, page
from stquant.report.decisions import summary
from stquant.report.history import Change, History
from stquant.report.runlog import Log, read

SHOWN = 20
"""Changes that the terminal shows; the page and --json have all."""


def report(
    log: Annotated[
        Path,
        typer.Argument(metavar="RUN.jsonl", dir_okay=False, help="Log of `stquant train --log` or RunLog."),
    ],
    html: Annotated[Path | None, typer.Option(dir_okay=False, help="Write one page that needs no other file.")] = None,
    png: Annotated[Path | None, typer.Option(dir_okay=False, help="Write a picture; needs matplotlib.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Show formats, bytes and damage of a run over time; exit status 1 if a budget was exceeded."""
    with console.plain_errors():
        found = read(log)
        history = History.of(found)
        if png is not None:
            _draw(history, log.name, png)
    if html is not None:
        html.parent.mkdir(parents=True, exist_ok=True)
        html.write_text(page.render(history, log.name), encoding="utf-8")
    if json:
        console.print_json(history.to_dict())
    else:
        _print(found, history)
        for written in filter(None, (html, png)):
            console.out.print(f"written: {written}", highlight=False, markup=False, soft_wrap=True)
    if history.exceeded:
        raise typer.Exit(1)


def _draw(history: History, name: str, path: Path) -> None:
    title = ", ".join([name, history.optimizer, *(pool.policy for pool in history.pools)])
    try:
        figures.history(history, title, path)
    except ModuleNotFoundError as error:
        raise ValueError("--png needs matplotlib; install it, or use --html, which does not") from error


def _print(log: Log, history: History) -> None:
    losses = f", last training loss {history.losses[-1][1]:.4f}" if history.losses else ""
    lines = [f"{history.optimizer}, {history.end:,} steps{losses}"]
    latest = {decision.states[0].parameter: decision for decision in log.decisions}
    lines += [summary(decision) for decision in latest.values()] or ["no decisions: no policy of the run was adaptive"]
    for line in lines:
        console.out.print(line, highlight=False, markup=False, soft_wrap=True)
    if history.exceeded:
        steps = ", ".join(f"{step:,}" for step in history.exceeded)
        console.out.print(f"the budget was exceeded at step {steps}", style="red", highlight=False)
    if history.changes:
        console.out.print(_table(history.changes[-SHOWN:], len(history.changes)))


def _table(changes: tuple[Change, ...], total: int) -> Table:
    table = Table(box=None, pad_edge=False, title=f"last {len(changes)} of {total} changes", title_justify="left")
    for column in ("step", "parameter", "state", "old", "new", "why"):
        table.add_column(column, justify="right" if column == "step" else "left", overflow="fold")
    for change in changes:
        state = change.decision
        cells = (f"{change.step:,}", state.parameter, state.state, state.old, state.new, state.why)
        table.add_row(*map(Text, cells))
    return table
