"""`stquant calibrate`: which factors explain the damage of low widths, measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from stquant.cli import console
from stquant.errors import did_you_mean
from stquant.jobs.calibration import calibrate as run
from stquant.jobs.calibration import findings
from stquant.jobs.probes import Probe, Settings
from stquant.jobs.workloads import WORKLOADS
from stquant.report import record

DEFAULT = Settings()


def calibrate(
    models: Annotated[str, typer.Option(help="Names of workloads, separated by commas.")] = ",".join(DEFAULT.models),
    out: Annotated[
        Path | None, typer.Option(help="File for the record; FILE.partial keeps the probes of a stopped run.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights, data and rounding.")] = DEFAULT.seed,
    length: Annotated[int, typer.Option(min=1, help="Steps with a state at another width.")] = DEFAULT.length,
    examples: Annotated[int, typer.Option(min=1, help="Held-out examples, about.")] = DEFAULT.examples,
    tensors: Annotated[int, typer.Option(min=2, help="Tensors of each model, at most.")] = DEFAULT.tensors,
    fork: Annotated[
        list[float] | None,
        typer.Option(min=0.0, max=1.0, help="Where to probe, as share of a full run; may be repeated."),
    ] = None,
    quiet: console.Quiet = False,
    json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Probe what each state at each width does to the loss, and select the factors that explain it."""
    with console.plain_errors():
        settings = Settings(_models(models), seed, tuple(fork or DEFAULT.forks), length, examples, tensors)
        partial = None if out is None else out.with_name(out.name + ".partial")
        with console.bars("damage {task.fields[damage]:.1e}", quiet) as bars:
            tasks = {name: bars.add_task(f"{name:5}", total=None, damage=0.0) for name in settings.models}

            def tell(model: str, done: int, total: int, probe: Probe) -> None:
                bars.update(tasks[model], completed=done, total=total, damage=probe.damage)

            data = findings(settings, run(settings, tell, partial))
    if out is not None and partial is not None:
        record.write(out, data)
        partial.unlink()
    if json:
        console.print_json(data)
        return
    if quiet:
        return
    for question, answer in data["questions"].items():
        console.out.print(_table(question, answer))


def _models(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.split(",")))
    unknown = [name for name in names if name not in WORKLOADS]
    if unknown:
        hint = did_you_mean(unknown[0], WORKLOADS)
        raise ValueError(f"models {','.join(unknown)!r} are unknown; use some of {','.join(WORKLOADS)}{hint}")
    return names


def _table(question: str, answer: dict[str, Any]) -> Table:
    table = Table(title=f"what tells {question} apart", title_justify="left")
    table.add_column("probes of")
    table.add_column("factors and their powers")
    for column in ("R²", "best", "held out", "by chance", "gamma", "bound"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, found in answer["selections"].items():
        powers = ", ".join(f"{n} {p:+.2f}" for n, p in zip(found["names"], found["exponents"], strict=True))
        certificate = found["certificate"]
        numbers = (
            certificate["r2"],
            certificate["best_r2"],
            found["cross_validated"],
            found["by_chance"],
            certificate["gamma"],
            certificate["bound"],
        )
        table.add_row(name, powers, *(f"{number:.2f}" for number in numbers))
    return table
