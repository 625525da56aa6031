"""bf16 weights with residuals, SGD and Lion, each against its yardstick on both workloads.

Every run of a seed starts from the same weights and sees the same data. The bf16 rows keep weights
and gradients in bf16 and compute in fp32, which isolates the weights and is fast on processors
without bf16 arithmetic; the row "bf16 throughout" computes in bf16, too. Results are written after
each run, and runs that the file already has are not repeated.

Writes results/variants.json. Run: python benchmarks/variants.py [--seeds 21 22] [--workers 2]
"""

import argparse
import dataclasses
import itertools
import json
import os
import statistics
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from evidence.arithmetic import ComputeInFloat32

from stquant.jobs.contenders import contender
from stquant.jobs.demo import MODELS, seed_spread
from stquant.jobs.training import Run
from stquant.jobs.workloads import WORKLOADS
from stquant.report import record

SEEDS = (21, 22)
"""Not the demo's."""

TARGET = Path(__file__).parent / "results" / "variants.json"


@dataclasses.dataclass(frozen=True)
class Row:
    """One way to train.

    Attributes:
        optimizer: What `contender` takes.
        yardstick: Name of the row that it is compared with; None for a yardstick itself.
        master_bits: Bits of the residual; None for fp32 weights.
        arithmetic: Of the model.
        seeds: How many of the seeds it runs on; 0 for all.
    """

    optimizer: str
    yardstick: str | None = None
    master_bits: int | None = None
    arithmetic: torch.dtype = torch.float32
    seeds: int = 0


ADAMW, ADAMW_21 = "torch AdamW, fp32", "AdamW 2+1, fp32"
ROWS = {
    ADAMW: Row("torch"),
    ADAMW_21: Row("2+1", ADAMW),
    "AdamW with fp32 states, bf16, 8-bit residual": Row("fp32", ADAMW, 8),
    "AdamW 2+1, bf16, 8-bit residual": Row("2+1", ADAMW_21, 8),
    "Lion, fp32": Row("lion:fp32"),
    "Lion, mulaw4": Row("lion:mulaw4", "Lion, fp32"),
    "SGD, fp32": Row("sgd:fp32"),
    "SGD, dynamic2": Row("sgd:dynamic2", "SGD, fp32"),
    "Lion, dynamic3-plain": Row("lion:dynamic3-plain", "Lion, fp32"),
    "Lion, mulaw5": Row("lion:mulaw5", "Lion, fp32"),
    "Lion, mulaw6": Row("lion:mulaw6", "Lion, fp32"),
    "Lion, mulaw8": Row("lion:mulaw8", "Lion, fp32"),
    "AdamW 2+1, bf16, 4-bit residual": Row("2+1", ADAMW_21, 4),
    "AdamW 2+1, bf16, stochastic": Row("2+1", ADAMW_21, 0),
    "SGD, dynamic3": Row("sgd:dynamic3", "SGD, fp32"),
    "SGD, mulaw4": Row("sgd:mulaw4", "SGD, fp32"),
    "AdamW 2+1, bf16 throughout, 8-bit residual": Row("2+1", ADAMW_21, 8, torch.bfloat16, seeds=1),
}


def train(model: str, name: str, seed: int) -> dict[str, Any]:
    """Train one row and return what is kept of it."""
    torch.set_num_threads(1)
    row, workload = ROWS[name], WORKLOADS[model]
    dtype, build = torch.float32, workload.build
    if row.master_bits is not None:
        dtype = torch.bfloat16
        if row.arithmetic is torch.float32:
            workload = dataclasses.replace(workload, build=lambda: ComputeInFloat32(build()))
    master_bits = "auto" if row.master_bits is None else row.master_bits
    run = Run(workload, contender(row.optimizer, seed, master_bits), seed, dtype=dtype)
    for _ in run.train():
        pass
    result = run.result()
    return {"model": model, "run": name, "seed": seed, **{key: result[key] for key in ("loss", "true_bits")}}


def summary(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put every row beside its yardstick: mean gap over the seeds that both have."""
    losses = {(run["model"], run["run"], run["seed"]): run["loss"] for run in runs}
    bits = {(run["model"], run["run"]): run["true_bits"] for run in runs}
    rows = []
    for model, name in itertools.product(MODELS, ROWS):
        found = {seed: loss for (m, n, seed), loss in losses.items() if (m, n) == (model, name)}
        yardstick = ROWS[name].yardstick
        pairs = [(loss, losses.get((model, yardstick, seed))) for seed, loss in found.items()]
        gaps = [loss - other for loss, other in pairs if other is not None]
        if found:
            rows.append(
                {
                    "model": model,
                    "run": name,
                    "yardstick": yardstick,
                    "seeds": len(found),
                    "loss": statistics.mean(found.values()),
                    "gap": statistics.mean(gaps) if gaps else None,
                    "spread": seed_spread(model),
                    "true_bits": bits[model, name],
                }
            )
    return rows


def wanted(seeds: Iterable[int]) -> list[tuple[str, str, int]]:
    """Model, row and seed of every run, one seed after the other."""
    return [
        (model, name, seed)
        for place, seed in enumerate(seeds)
        for name, row in ROWS.items()
        for model in MODELS
        if not row.seeds or place < row.seeds
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    runs: list[dict[str, Any]] = json.loads(TARGET.read_text())["runs"] if TARGET.exists() else []
    done = {(run["model"], run["run"], run["seed"]) for run in runs}
    with ProcessPoolExecutor(arguments.workers, get_context("spawn")) as pool:
        for future in as_completed(pool.submit(train, *key) for key in wanted(arguments.seeds) if key not in done):
            runs.append(future.result())
            record.write(TARGET, {"rows": summary(runs), "runs": runs})
            print(runs[-1], flush=True)


if __name__ == "__main__":
    main()
