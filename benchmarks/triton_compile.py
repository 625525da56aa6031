"""Compiles the triton kernels ahead of time and records registers, loads, stores and spills; needs no GPU.

Without options: the variants of the table in docs/gpu.md, on every architecture. `--few` compiles what the
tests do: every pair of some formats, rules, dtypes, blocks and architectures; `--pairs` every pair of all of
them; `--all` the full product, days, of which `--part 1/100` takes the first of a hundred fair samples. All
go on past kernels that spill or access parameters in narrow pieces, list them at the end and exit with 1.
Counts and costs go into `results/triton_compile.json`, but for `--few` and chosen architectures.
Run: python benchmarks/triton_compile.py [--few | --pairs | --all [--part 1/100]] [--architectures sm_90]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import triton

from stquant.kernels.triton import variants

TARGET = Path(__file__).parent / "results" / "triton_compile.json"
ROWS = {
    "fp32, dynamic2 + log1": ((2, 2, 1), (4, 1, 1), (0, 0, 0, 0), (128, 1, 1)),
    "bf16 with 8 residual bits, dynamic2 + log1": ((2, 2, 1), (4, 1, 1), (1, 1, 8, 1), (128, 1, 1)),
    "fp32, mulaw4 + log4": ((3, 4, 0), (4, 4, 1), (0, 0, 0, 0), (128, 1, 1)),
    "fp32, dynamic2 + log1, short blocks": ((2, 2, 1), (4, 1, 1), (0, 0, 0, 0), (128, 0, 1)),
    "fp32, unpacked states": ((1, 0, 0), (1, 0, 0), (0, 0, 0, 0), (128, 1, 1)),
}

Costs = list[tuple[str, variants.Cost]]
"""Architectures of compiled kernels and what the kernels cost."""


def compiled(jobs: Sequence[variants.Job]) -> tuple[Costs, Counter[str]]:
    """Compile each job; return what they cost, and how many complaints each architecture has."""
    costs, wrong = [], []
    for number, (architecture, kernel, constants) in enumerate(jobs, start=1):
        cost = variants.cost(variants.compile_(architecture, kernel, constants))
        costs.append((architecture, cost))
        complaint = variants.complaint(cost, constants)
        print(f"{number} of {len(jobs)}: {architecture} {kernel} {cost} {complaint or ''}", flush=True)
        if complaint:
            wrong.append((architecture, f"{architecture} {kernel} {constants}: {complaint}"))
    for _, message in wrong:
        print(message)
    return costs, Counter(architecture for architecture, _ in wrong)


def counts(costs: Costs, complaints: Counter[str], chosen_from: Sequence[variants.Job]) -> dict[str, Any]:
    """How many kernels were compiled, out of how many, by architecture."""
    found: dict[str, Any] = {}
    for architecture in variants.ARCHITECTURES:
        own = [cost for name, cost in costs if name == architecture]
        found[architecture] = {
            "compiled": len(own),
            "of": sum(name == architecture for name, _, _ in chosen_from),
            "complaints": complaints[architecture],
            "spills": sum(cost.spills for cost in own),
            "most_registers": max(cost.registers for cost in own),
        }
    return found


def record(name: str, found: Any) -> None:
    """Write a section of the record; the others stay."""
    before = json.loads(TARGET.read_text()) if TARGET.exists() else {}
    TARGET.write_text(json.dumps(before | {"triton": triton.__version__, name: found}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    chosen = parser.add_mutually_exclusive_group()
    for name in ("few", "pairs", "all"):
        chosen.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--part", default="1/1", metavar="NUMBER/PARTS", help="of --all")
    parser.add_argument("--architectures", nargs="+", default=list(variants.ARCHITECTURES))
    options = parser.parse_args()
    architectures = options.architectures
    number, parts = map(int, options.part.split("/"))
    if options.all:
        name, kernels = "all", variants.every(architectures)
        jobs = kernels[number - 1 :: parts]
    elif options.few or options.pairs:
        lists = (*(variants.FEW if options.few else variants.MANY)[:-1], architectures)
        name, jobs = "pairs", variants.pairs(lists) + variants.others(architectures)
        kernels = jobs
    else:
        name = "rows"
        jobs = kernels = [(a, "adam", variants.adam(*row)) for row in ROWS.values() for a in architectures]
    costs, complaints = compiled(jobs)
    if not options.few and architectures == list(variants.ARCHITECTURES):
        if name == "rows":
            kinds = [kind for kind in ROWS for _ in architectures]
            rows = zip(kinds, costs, strict=True)
            record(name, [{"kernel": kind, "architecture": a, **dataclasses.asdict(c)} for kind, (a, c) in rows])
        else:
            record(name, counts(costs, complaints, kernels))
    raise SystemExit(int(bool(complaints)))


if __name__ == "__main__":
    main()
