"""What adapting costs: the time of decisions in a run, and of the allocator for many states.

A decision's share is the CPU time by which steps that measure and decide exceed the median of the
steps around them, over the median steps of training (forward and backward included): of `EVERY`
steps, and of a whole run, whose first decisions come earlier. What an adaptive policy costs in a
step without a decision is the difference of medians to the optimizer steps of a fixed policy of the same
formats, taken in turn. Writes results/adaptive.json.
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
EVERY, STEPS = 100, 600
MODELS = ("gpt2", "vit")
STATES = (100, 1_000, 10_000, 100_000)
REPEATS = 5
PAIRS = 200


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
        "share_between": between(model) / usual,
    }


def between(model: str) -> float:
    """Return the CPU seconds that an adaptive optimizer's step takes more than a fixed one's, without a decision."""

    def make(policy: Any) -> stquant.AdamW:
        module = WORKLOADS[model].build()
        for parameter in module.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer = stquant.AdamW(module.named_parameters(), policy=policy)
        for _ in range(EVERY // 2):
            optimizer.step()
        return optimizer

    adaptive = make(stquant.Budget(bits=3.0, every=10 * PAIRS))
    packed = {row.state: row.format for row in adaptive.ledger().rows if not row.reason and row.state.startswith("exp")}
    pair = (adaptive, make(stquant.Fixed(**packed)))
    times: dict[int, list[float]] = {0: [], 1: []}
    for number in range(PAIRS):
        for place in (number % 2, 1 - number % 2):  # who comes first pays for cold caches
            start = time.process_time()
            pair[place].step()
            times[place].append(time.process_time() - start)
    return statistics.median(times[0]) - statistics.median(times[1])


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
