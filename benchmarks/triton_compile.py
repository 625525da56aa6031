"""Compiles the triton kernels ahead of time and records registers, loads, stores and spills; needs no GPU.

Without options: the variants of the table in docs/gpu.md, on every architecture, into
`results/triton_compile.json`. `--few` compiles what the tests do: every pair of some formats, rules,
dtypes, blocks and architectures; `--pairs` every pair of all of them, `--all` the full product, hours.
These write nothing. All stop at a kernel that spills or reads parameters in narrow pieces.
Run: python benchmarks/triton_compile.py [--few | --pairs | --all] [--architectures sm_90]
"""

from __future__ import annotations

import argparse
import dataclasses
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
    "fp32, dynamic2 + log1, short blocks": ((2, 2, 1), (4, 1, 1), (0, 0, 0, 0), (128, 0)),
    "fp32, unpacked states": ((1, 0, 0), (1, 0, 0), (0, 0, 0, 0), (128, 1)),
}


def complaint(cost: variants.Cost, constants: Mapping[str, int]) -> str | None:
    """Say what is wrong with a kernel: spills, or narrow access to what has whole blocks."""
    if cost.spills:
        return f"{cost.spills} spills"
    if constants["WHOLE"] and "GRAD" in constants and (cost.loads[1] < 2 or not cost.stores[1]):
        return f"128-bit loads and stores: {cost.loads[1]} and {cost.stores[1]}"
    return None


def compiled(jobs: list[variants.Job]) -> Iterator[dict[str, Any]]:
    """Compile each job and say what it costs."""
    for number, (architecture, kernel, constants) in enumerate(jobs):
        cost = variants.cost(variants.compile_(architecture, kernel, constants))
        wrong = complaint(cost, constants)
        print(f"{number + 1} of {len(jobs)}: {architecture} {kernel} {cost} {wrong or ''}", flush=True)
        if wrong:
            raise SystemExit(f"{architecture} {kernel} {constants}: {wrong}")
        yield {"architecture": architecture, **dataclasses.asdict(cost)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    chosen = parser.add_mutually_exclusive_group()
    for name in ("few", "pairs", "all"):
        chosen.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--architectures", nargs="+", default=list(variants.ARCHITECTURES))
    options = parser.parse_args()
    architectures = options.architectures
    if options.few or options.pairs or options.all:
        kinds = (*(variants.FEW if options.few else variants.MANY)[:-1], architectures)
        jobs = variants.every(architectures) if options.all else variants.pairs(kinds)
        list(compiled(jobs + variants.transfers_of(architectures)))
        return
    named = [
        (name, (architecture, "adam", variants.adam(*row)))
        for name, row in ROWS.items()
        for architecture in architectures
    ]
    found = zip(named, compiled([job for _, job in named]), strict=True)
    rows = [{"kernel": name, **cost} for (name, _), cost in found]
    TARGET.write_text(json.dumps({"triton": triton.__version__, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
