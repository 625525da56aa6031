"""Time of a whole AdamW step on the CPU, against torch's fused fp32 AdamW in the same process.

Contenders take turns, each with every number of threads, so that ratios at one and at two threads are
of the same minutes; each figure is the median over the rounds of the CPU time that the step's threads
used, so that waiting for the core does not count; those far slower than torch's take two turns. No
speed is printed unless the compiled kernels equal the reference first. Writes `results/cpu_step.json`,
which holds one record for each kind of machine; a run replaces the tables that it measures of its own.
Other packages have a row each if they are installed. Single parameters of several sizes follow, as
torch's time differs from one allocation of its four tensors to the next. Threads that wait must not spin, because
that would count.
Run: OMP_WAIT_POLICY=passive PYTHONPATH=. python benchmarks/cpu_step.py [--rounds 7] [--threads 1 2]
    [--isa avx2 scalar] [--models large gpt2] [--contenders ours others sizes] [--sizes 8 64]
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from tests.parity import helpers

import stquant
from stquant.kernels import cpu, reference
from stquant.report.record import processor

TARGET = Path(__file__).parent / "results" / "cpu_step.json"
PAIRS = {
    "2 + 0 bits": ("dynamic2", "log0"),
    "2 + 1 bits, stochastic v": ("dynamic2", "log1"),
    "2 bits": ("dynamic2", "log2-nearest"),
    "3 bits": ("dynamic3", "log3-nearest"),
    "4 bits": ("mulaw4", "log4-nearest"),
    "5 bits": ("mulaw5", "log5"),
    "6 bits": ("mulaw6", "log6"),
    "8 bits": ("mulaw8", "log8"),
    "2 bits, stochastic v": ("dynamic2", "log2"),
    "4 bits, stochastic v": ("mulaw4", "log4"),
    "8 bits, stochastic v": ("mulaw8", "log8-stochastic"),
}
OTHERS = {
    "DeepSpeedCPUAdam": ("deepspeed.ops.adam", "DeepSpeedCPUAdam"),
    "torchao AdamW8bit": ("torchao.optim", "AdamW8bit"),
    "torchao AdamW4bit": ("torchao.optim", "AdamW4bit"),
    "torchao AdamWFp8": ("torchao.optim", "AdamWFp8"),
    "bitsandbytes AdamW8bit": ("bitsandbytes.optim", "AdamW8bit"),
}


PACKAGES = ("deepspeed", "torchao", "bitsandbytes")

SIZES = (8, 16, 24, 32, 48, 64, 80, 96)
"""Millions (2^20) of elements of one parameter."""

SIZED = ("2 + 0 bits", "4 bits", "8 bits, stochastic v")
"""The pairs that are measured at every size: the narrowest, one that rounds to nearest, the slowest."""

SLOW = 2.5
"""Times torch's fused step beyond which two turns will do."""


def gpt2_shapes() -> list[tuple[int, ...]]:
    """The 148 parameters of GPT-2 124M."""
    block = [
        (768,),
        (768,),
        (768, 2304),
        (2304,),
        (768, 768),
        (768,),
        (768,),
        (768,),
        (768, 3072),
        (3072,),
        (3072, 768),
        (768,),
    ]
    return [(50257, 768), (1024, 768), *block * 12, (768,), (768,)]


def check_parity(isas: list[str]) -> None:
    """Raise unless every pair equals the reference on every instruction set."""
    cases = [helpers.Case({"exp_avg": m, "exp_avg_sq": v}, (9, 1000)) for m, v in PAIRS.values()]
    truth = helpers.run(reference.adam_step_, cases, helpers.ADAMW, 5)
    for isa in isas:
        cpu.use(isa)
        helpers.assert_equal(helpers.run(cpu.adam_step_, cases, helpers.ADAMW, 5), truth, cases)


def parameters(shapes: list[tuple[int, ...]]) -> list[torch.nn.Parameter]:
    made = [torch.nn.Parameter(torch.randn(shape) * 0.02) for shape in shapes]
    for parameter in made:
        parameter.grad = torch.randn_like(parameter) * 1e-3
    return made


def floor(shapes: list[tuple[int, ...]]) -> Callable[[], None]:
    """Read and write the bytes of a 4-bit step with next to no arithmetic: weights, gradients, codes."""
    elements = count(shapes)
    weight, grad = torch.zeros(elements), torch.zeros(elements)
    codes = torch.zeros(elements // 8, dtype=torch.int64)

    def step() -> None:
        weight.add_(grad)
        codes.add_(1)

    return step


Steps = dict[str, Callable[[], None]]


def ours(shapes: list[tuple[int, ...]], isas: list[str]) -> Steps:
    """Return torch's steps and ours by name, all on the same parameters."""
    shared = parameters(shapes)
    steps: Steps = {
        "torch fused": torch.optim.AdamW(shared, fused=True).step,
        "torch foreach": torch.optim.AdamW(shared, foreach=True).step,
        "byte floor, 4 bits": floor(shapes),
    }
    for isa in isas:
        for name in PAIRS:
            steps[f"{isa}, {name}"] = packed(shared, isa, name)
    return steps


def packed(shared: list[torch.nn.Parameter], isa: str, name: str) -> Callable[[], None]:
    """Return our step with the pair of that name on an instruction set."""
    first, second = PAIRS[name]
    optimizer = stquant.AdamW(shared, policy=stquant.Fixed(exp_avg=first, exp_avg_sq=second))

    def step() -> None:
        cpu.use(isa)
        optimizer.step()

    return step


def sized(millions: int, isa: str) -> Steps:
    """Return torch's fused step and a few of ours, with the best instruction set, on one parameter."""
    shared = parameters([(millions << 10, 1024)])
    steps: Steps = {"torch fused": torch.optim.AdamW(shared, fused=True).step}
    return steps | {name: packed(shared, isa, name) for name in SIZED}


def others(shapes: list[tuple[int, ...]]) -> tuple[Steps, dict[str, str]]:
    """Return the steps of other packages next to torch's and our default, and why some have none."""
    shared = parameters(shapes)
    steps: Steps = {
        "torch fused": torch.optim.AdamW(shared, fused=True).step,
        "ours, default": stquant.AdamW(shared).step,
    }
    missing = {}
    for name, (module, attribute) in OTHERS.items():
        try:
            steps[name] = getattr(importlib.import_module(module), attribute)(shared).step
        except Exception as error:  # another package may fail in any way; its row says how
            missing[name] = f"{type(error).__name__}: {error}"
    return steps, missing


def measure(steps: Steps, rounds: int, elements: int, threads: list[int]) -> dict[int, list[dict[str, object]]]:
    """Take turns and return rows by the number of threads; a first round warms up, what is slow takes two more."""
    times: dict[tuple[str, int], list[float]] = {(name, count): [] for name in steps for count in threads}
    for number in range(rounds + 1):
        for (name, count), own in times.items():
            if len(own) == 2 and min(own) > SLOW * min(times["torch fused", count]):
                continue
            torch.set_num_threads(count)
            begin = time.process_time()
            steps[name]()
            if number:
                own.append((time.process_time() - begin) / elements * 1e9)
    return {count: [_row(name, times[name, count], times["torch fused", count]) for name in steps] for count in threads}


def _row(name: str, own: list[float], base: list[float]) -> dict[str, object]:
    return {
        "name": name,
        "ns_per_element": round(statistics.median(own), 3),
        "fastest": round(min(own), 3),
        "ratio": round(statistics.median(own) / statistics.median(base), 3),
        "ratio_of_fastest": round(min(own) / min(base), 3),
        "turns": len(own),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--isa", nargs="+", default=cpu.instruction_sets())
    parser.add_argument("--models", nargs="+", default=["large", "gpt2"])
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--contenders", nargs="+", default=["ours", "others", "sizes"])
    parser.add_argument("--out", type=Path, default=TARGET)
    options = parser.parse_args()
    check_parity(cpu.instruction_sets())
    every = {
        "large": (f"{options.millions}M elements", [(options.millions << 10, 1024)]),
        "gpt2": ("GPT-2 124M", gpt2_shapes()),
    }
    models = [every[model] for model in options.models]
    conditions = {
        "processor": processor(),
        "instruction_sets": cpu.instruction_sets(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        **{name: version(name) for name in PACKAGES if find_spec(name)},
        "clock": "CPU time of the process",
        "rounds": options.rounds,
    }

    def record(
        model: str, elements: int, contenders: str, threads: list[int], steps: Steps, missing: dict[str, str]
    ) -> None:
        """Measure, print and write a table for each number of threads."""
        before = os.getloadavg()[0]
        found = measure(steps, options.rounds, elements, threads)
        load = {"before": round(before, 1), "after": round(os.getloadavg()[0], 1)}
        for number, rows in found.items():
            table = {
                "model": model,
                "contenders": contenders,
                "threads": number,
                "load_average": load,
                "wait_policy": os.environ.get("OMP_WAIT_POLICY"),
                "rows": rows,
                "missing": missing,
            }
            show(table)
            write(options.out, conditions, table)

    if "ours" in options.contenders:
        for model, shapes in models:
            record(model, count(shapes), "ours", options.threads, ours(shapes, options.isa), {})
    cpu.use(options.isa[0])
    if "others" in options.contenders:
        for model, shapes in models:
            record(model, count(shapes), "others", options.threads[:1], *others(shapes))
    if "sizes" in options.contenders:
        for millions in options.sizes:
            steps = sized(millions, cpu.instruction_sets()[0])
            record(f"{millions}M elements", millions << 20, "sizes", options.threads[:1], steps, {})


def count(shapes: list[tuple[int, ...]]) -> int:
    return sum(torch.Size(shape).numel() for shape in shapes)


def show(table: dict[str, Any]) -> None:
    print(f"{table['model']}, {table['threads']} thread(s)")
    for row in table["rows"]:
        ratios = f"{row['ratio']:6}  fastest {row['ratio_of_fastest']}"
        print(f"  {row['name']:36s} {row['ns_per_element']:8} ns  {ratios}", flush=True)
    for name, reason in table["missing"].items():
        print(f"  {name:36s} not measured: {reason}")


def write(path: Path, conditions: dict[str, object], table: dict[str, Any]) -> None:
    """Replace a table of this machine's record, or add it; a record of other conditions begins anew."""
    machines = json.loads(path.read_text())["machines"] if path.exists() else []
    own = next((old for old in machines if old["conditions"] == conditions), {"tables": []})
    place = [table[key] for key in ("model", "contenders", "threads")]
    tables = [old for old in own["tables"] if [old[key] for key in ("model", "contenders", "threads")] != place]
    others = [old for old in machines if old["conditions"]["processor"] != conditions["processor"]]
    record = {"conditions": conditions, "tables": [*tables, table]}
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"machines": [*others, record]}, indent=2) + "\n")


if __name__ == "__main__":
    main()
