"""Runs: one cell, and all cells of a file, each written as soon as it is there."""

from __future__ import annotations

import dataclasses
import json
import math
import time
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

import stquant
from stquant.codecs import catalog
from stquant.jobs.contenders import Contender as Entrant
from stquant.jobs.training import FINAL_EVALUATIONS, Run
from stquant.report import record
from stquant.report.memory import live

from .arithmetic import ComputeInFloat32
from .contenders import CONTENDERS, why_missing
from .plan import Cell
from .workloads import workload


def run(cell: Cell, steps: int | None = None) -> dict[str, Any]:
    """Train one cell and return what is kept of it.

    Args:
        cell: What to run.
        steps: Steps, or None for the workload's own number.
    """
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    # Other packages compile their steps; compiling takes longer than these runs, and the arithmetic is the same.
    torch.compiler.set_stance("force_eager")
    contender = CONTENDERS[cell.contender]
    found: dict[str, Any] = dataclasses.asdict(cell) | {"kind": contender.kind} | record.origin()
    if missing := why_missing(contender):
        return found | {"missing": missing}
    try:
        return found | _trained(cell, steps)
    except Exception as error:
        if contender.kind != "rival":
            raise
        return found | {"missing": f"{type(error).__name__}: {error}"}


def _trained(cell: Cell, steps: int | None) -> dict[str, Any]:
    contender, chosen = CONTENDERS[cell.contender], workload(cell.workload)
    if contender.dtype is not torch.float32:
        build = chosen.build
        chosen = dataclasses.replace(chosen, build=lambda: ComputeInFloat32(build()))
    if steps is not None:
        chosen = dataclasses.replace(chosen, steps=steps)
    entrant = Entrant(cell.contender, lambda params, w: contender.make(list(params), w, cell.seed))
    started = time.process_time()
    run = Run(chosen, entrant, cell.seed, dtype=contender.dtype, evaluations=FINAL_EVALUATIONS)
    losses = list(run.train())
    held = live(run.model, run.optimizer)
    return {
        "steps": run.done,
        "loss": _finite(run.curve.final),
        "training_loss": _finite(sum(losses[-20:]) / len(losses[-20:])),
        "parameters": held.parameters,
        "weight_bytes": held.weights,
        "residual_bytes": held.residuals,
        "state_bytes": held.states,
        "packed_bits": _packed_bits(run.optimizer),
        "cpu_seconds": round(time.process_time() - started, 1),
    }


def _finite(loss: float) -> float | None:
    """A loss that JSON can hold; None if training diverged."""
    return loss if math.isfinite(loss) else None


def _packed_bits(optimizer: torch.optim.Optimizer) -> float | None:
    """True bits per element of the states that we pack; None if there are none."""
    if not isinstance(optimizer, stquant.AdamW):
        return None
    rows = [row for row in optimizer.ledger().rows if row.elements and row.state != "residual"]
    packed = [row for row in rows if catalog.get(row.format).packed]
    return 8 * sum(row.bytes for row in packed) / sum(row.elements for row in packed) if packed else None


def run_all(
    path: Path,
    cells: Iterable[Cell],
    summarize: Callable[[list[dict[str, Any]]], dict[str, Any]],
    progress: Callable[[Cell, int], None],
    workers: int = 1,
    steps: int | None = None,
) -> None:
    """Run the cells that a file lacks, and write it after each.

    Args:
        path: The file.
        cells: All runs that belong to it.
        summarize: From runs to what stands beside them in the file.
        progress: Told each cell that is done, and how many remain.
        workers: Processes.
        steps: Steps of each run, or None for the workload's own number.
    """
    runs: list[dict[str, Any]] = json.loads(path.read_text())["runs"] if path.exists() else []
    done = {Cell(run["workload"], run["contender"], run["seed"]) for run in runs}
    left = [cell for cell in cells if cell not in done]
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        futures = {pool.submit(run, cell, steps): cell for cell in left}
        for remaining, future in zip(reversed(range(len(left))), as_completed(futures), strict=True):
            runs.append(future.result())
            record.write(path, {**summarize(runs), "runs": runs})
            progress(futures[future], remaining)
