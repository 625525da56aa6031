"""Runs what `plan` registers and writes benchmarks/results/evidence_NAME.json; can be stopped at any time.

Run: python -m benchmarks.evidence quality stress [--workers 2]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.records import RESULTS
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .cells import run_all
from .plan import FILES, Cell
from .summary import summarize


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", default=list(FILES), choices=FILES, metavar="FILE", help=", ".join(FILES))
    parser.add_argument("--workers", type=int, default=1, help="processes, of one thread each")
    parser.add_argument("--smoke", type=int, metavar="STEPS", help="every row once, on one seed, in so many steps")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.smoke and options.out == RESULTS:
        parser.error("--smoke needs a folder of its own, so that toy runs stay out of the records: --out FOLDER")
    for name in options.files:
        cells = list(FILES[name].cells())
        if options.smoke:
            cells = list({(cell.workload, cell.contender): cell for cell in reversed(cells)}.values())[::-1]
        _run(name, cells, options)


def _run(name: str, cells: list[Cell], options: argparse.Namespace) -> None:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns) as bar:
        task = bar.add_task(name, total=len(cells))

        def progress(cell: Cell, remaining: int) -> None:
            bar.update(task, completed=len(cells) - remaining)
            bar.console.print(f"{cell.workload}, {cell.contender}, seed {cell.seed}")

        path = options.out / f"evidence_{name}.json"
        run_all(path, cells, summarize, progress, options.workers, options.smoke)


if __name__ == "__main__":
    main()
