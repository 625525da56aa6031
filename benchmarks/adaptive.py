"""What adapting costs: the time of decisions in a run, and of the allocator for many states.

A decision's share is the CPU time by which steps that measure and decide exceed the median of the
steps around them, over `EVERY` median steps of training (forward and backward included). The
first decisions, which come earlier, count as well. Writes results/adaptive.json.
Run: python benchmarks/adaptive.py
"""

import statistics
import time
from pathlib import Path
from typing import Any

import torch

import stquant
from stquant.jobs.contenders import Contender
from stquant.jobs.training import Run
from stquant.jobs.workloads import WORKLOADS
from stquant.policy.allocator import Table, within_bytes
from stquant.report import record

TARGET = Path(__file__).parent / "results" / "adaptive.json"
EVERY, STEPS = 100, 200
MODELS = ("gpt2", "vit")
STATES = (100, 1_000, 10_000, 100_000)
REPEATS = 5


def share(model: str) -> dict[str, Any]:
    """Train with decisions and return what they took."""

    def make(params: Any, workload: Any) -> torch.optim.Optimizer:
        policy = stquant.Budget(bits=3.0, every=EVERY)
        options = {"lr": workload.lr, "betas": workload.betas, "weight_decay": workload.weight_decay}
        return stquant.AdamW(params, policy=policy, **options)

    run = Run(WORKLOADS[model], Contender("Budget(bits=3.0)", make), steps=STEPS)
    run.evaluate = lambda: 0.0  # type: ignore[method-assign]  # only steps are timed
    optimizer = run.optimizer
    assert isinstance(optimizer, stquant.AdamW)
    times: list[float] = []
    decided: list[int] = []
    last, start = 0, time.process_time()
    for number, _ in enumerate(run.train(), start=1):
        times.append(time.process_time() - start)
        step = max((decision.step for decision in optimizer.decisions()), default=0)
        if step != last:
            decided.append(number)
            last = step
        start = time.process_time()
    usual = statistics.median(times)
    extra = sum(times[number - 1] - usual for number in decided)
    return {
        "model": model,
        "every": EVERY,
        "steps": STEPS,
        "decisions": len(decided),
        "median_step_ms": 1000 * usual,
        "decision_ms": 1000 * extra / len(decided),
        "share_of_run": extra / (STEPS * usual),
        "share_at_every": extra / len(decided) / (EVERY * usual),
    }


def allocation(states: int) -> dict[str, Any]:
    """Time the allocator on states of random sizes and damages."""
    generator = torch.Generator().manual_seed(states)
    size = 10 ** (3 * torch.rand(states, 1, generator=generator, dtype=torch.float64) + 3)
    bits = torch.tensor([0, 1, 2, 3, 4, 5, 6, 8], dtype=torch.float64)
    noise = 0.5 + torch.rand(states, 8, generator=generator, dtype=torch.float64)
    table = Table((size * (bits + 0.25) / 8).long(), size * 0.25**bits * noise)
    times = []
    for _ in range(REPEATS):
        start = time.process_time()
        within_bytes(table, 2 * table.least)
        times.append(time.process_time() - start)
    return {"states": states, "milliseconds": 1000 * statistics.median(times)}


def main() -> None:
    torch.set_num_threads(1)
    shares = [share(model) for model in MODELS]
    allocations = [allocation(states) for states in STATES]
    record.write(TARGET, {"decisions": shares, "allocator": allocations})
    print(*shares, *allocations, sep="\n")


if __name__ == "__main__":
    main()
