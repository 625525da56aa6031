"""Compiles the triton kernels ahead of time and records registers, loads, stores and spills; needs no GPU.

Without options: the variants of the table in docs/gpu.md, on every architecture, into
`results/triton_compile.json`; `--quick` takes the first two and writes nothing. `--once`, `--pairs`
and `--all` compile a covering array of every choice, of every pair of choices, or the full product
instead, and write nothing. All stop at a kernel that spills or reads parameters in narrow pieces.
Run: python benchmarks/triton_compile.py [--pairs] [--architectures sm_90]
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import triton

from stquant.kernels.triton import variants

TARGET = Path(__file__).parent / "results" / "triton_compile.json"
ROWS = {
    "fp32, dynamic2 + log1": ((2, 2, 1), (4, 1, 1), (0, 0, 0, 0), (128, 1)),
    "bf16 with 8 residual bits, dynamic2 + log1": ((2, 2, 1), (4, 1, 1), (1, 1, 8, 1), (128, 1)),
    "fp32, mulaw4 + log4": ((3, 4, 0), (4, 4, 1), (0, 0, 0, 0), (128, 1)),
    "fp32, unpacked states": ((1, 0, 0), (1, 0, 0), (0, 0, 0, 0), (128, 1)),
}


def complaint(cost: variants.Cost, constants: Mapping[str, int]) -> str | None:
    """Say what is wrong with a kernel: spills, or narrow access to what has whole blocks."""
    if cost.spills:
        return f"{cost.spills} spills"
    if constants["WHOLE"] and "GRAD" in constants and (cost.loads[1] < 2 or not cost.stores[1]):
        return f"128-bit loads and stores: {cost.loads[1]} and {cost.stores[1]}"
    return None


def compiled(jobs: list[tuple[str, str, dict[str, int]]]) -> Iterator[dict[str, Any]]:
    """Compile each (architecture, kernel, constants) and say what it costs."""
    for number, (architecture, kernel, constants) in enumerate(jobs):
        cost = variants.cost(variants.compile_(architecture, constants, kernel))
        wrong = complaint(cost, constants)
        print(f"{number + 1} of {len(jobs)}: {architecture} {kernel} {cost} {wrong or ''}", flush=True)
        if wrong:
            raise SystemExit(f"{architecture} {kernel} {constants}: {wrong}")
        yield {"architecture": architecture, **dataclasses.asdict(cost)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    chosen = parser.add_mutually_exclusive_group()
    for name in ("quick", "once", "pairs", "all"):
        chosen.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--architectures", nargs="+", default=list(variants.ARCHITECTURES))
    options = parser.parse_args()
    if options.once or options.pairs or options.all:
        found = variants.every() if options.all else variants.covering(2 if options.pairs else 1)
        jobs = [("adam", constants) for constants in found] + variants.others()
        if options.once:  # the architectures take turns
            turns = zip(itertools.cycle(options.architectures), jobs, strict=False)
            list(compiled([(architecture, *job) for architecture, job in turns]))
        else:
            list(compiled([(architecture, *job) for job in jobs for architecture in options.architectures]))
        return
    shown = list(ROWS)[:2] if options.quick else list(ROWS)
    jobs = [
        (architecture, "adam", variants.adam(*ROWS[row])) for row in shown for architecture in options.architectures
    ]
    names = [row for row in shown for _ in options.architectures]
    rows = [{"kernel": name, **row} for name, row in zip(names, compiled(jobs), strict=True)]
    if not options.quick:
        TARGET.write_text(json.dumps({"triton": triton.__version__, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
