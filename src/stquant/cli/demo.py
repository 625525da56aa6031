"""`stquant demo`: both models, four optimizers, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import Progress, TaskID
from rich.table import Table

from stquant.cli import console
from stquant.jobs.demo import Comparison, compare, demo_jobs
from stquant.jobs.parallel import Job
from stquant.report import record
from stquant.report.figures import loss_curves


def demo(
    out: Annotated[Path, typer.Option(help="Folder for demo.json and demo.png.")] = Path("demo"),
    seed: Annotated[int, typer.Option(min=0, help="Seed of all runs.")] = 0,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of every run; the full number by default.")] = None,
    quiet: console.Quiet = False,
    json: Annotated[bool, typer.Option("--json", help="Print the comparison as JSON.")] = False,
) -> None:
    """Train GPT-2 and ViT with torch AdamW, NAdam and STQuant, and compare."""
    jobs = demo_jobs(seed, steps)
    with console.bars(quiet=quiet) as bars:
        comparison = compare(jobs, _Bars(bars, jobs))
    data = comparison.to_dict()
    record.write(out / "demo.json", data)
    loss_curves(comparison.results, out / "demo.png")
    if json:
        console.print_json(data)
        return
    if quiet:
        return
    console.out.print(_table(comparison))
    console.out.print(f"written: {out / 'demo.json'}, {out / 'demo.png'}", highlight=False)


class _Bars:
    """One bar for each job."""

    def __init__(self, bars: Progress, jobs: list[Job]) -> None:
        self._bars = bars
        self._tasks: dict[Job, TaskID] = {
            job: bars.add_task(f"{job.model:5} {job.optimizer:6}", total=None, loss=0.0) for job in jobs
        }

    def __call__(self, job: Job, done: int, steps: int, loss: float) -> None:
        self._bars.update(self._tasks[job], completed=done, total=steps, loss=loss)


def _table(comparison: Comparison) -> Table:
    table = Table(title="held-out loss; a gap is to torch AdamW with the same seed", title_justify="left")
    for column in ("model", "optimizer"):
        table.add_column(column, no_wrap=True)
    for column in ("loss", "gap", "seed spread", "true bits", "state bytes", "saved"):
        table.add_column(column, justify="right", no_wrap=column in ("gap", "state bytes"))
    for row in comparison.rows():
        table.add_row(*_cells(row), end_section=row["last"])
    return table


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        row["model"],
        row["optimizer"],
        f"{row['loss']:.4f}",
        f"{row['gap']:+.4f}",
        f"{row['spread']:.4f}",
        f"{row['true_bits']:.2f}",
        f"{row['state_bytes']:,}",
        f"{row['saved']:.1%}",
    ]
