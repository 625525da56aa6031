"""Which variant of a width is its default: prepay or not, nearest or stochastic.

Trains the two example workloads with each variant of one state, the other state in fp32, on seeds
that the demo does not use. Writes results/default_formats.json. Run:
python benchmarks/default_formats.py
"""

import statistics
from pathlib import Path

from stquant.jobs.demo import MODELS, seed_spread
from stquant.jobs.parallel import Job, run_all
from stquant.report import record

SEEDS = (11, 12)
VARIANTS = {
    "exp_avg": ("dynamic2", "dynamic3", "dynamic3-plain", "mulaw4", "mulaw4-prepay"),
    "exp_avg_sq": (
        "log0",
        "log1",
        "log2",
        "log4",
        "log4-nearest",
        "log5",
        "log5-stochastic",
        "log8",
        "log8-stochastic",
    ),
}
TARGET = Path(__file__).parent / "results" / "default_formats.json"


def policies() -> dict[str, str]:
    """Command-line policies by variant; the first is the yardstick."""
    found = {"fp32": "torch"}
    found |= {variant: f"{variant}+fp32" for variant in VARIANTS["exp_avg"]}
    return found | {variant: f"fp32+{variant}" for variant in VARIANTS["exp_avg_sq"]}


def main() -> None:
    jobs = [Job(model, policy, seed) for policy in policies().values() for model in MODELS for seed in SEEDS]
    results = run_all(jobs, lambda job, done, steps, _: done == steps and print(job, flush=True))
    loss = {job: result["loss"] for job, result in zip(jobs, results, strict=True)}
    rows = []
    for model in MODELS:
        for variant, policy in policies().items():
            gaps = [loss[Job(model, policy, seed)] - loss[Job(model, "torch", seed)] for seed in SEEDS]
            losses = [loss[Job(model, policy, seed)] for seed in SEEDS]
            rows.append({"model": model, "variant": variant, "losses": losses, "gap": statistics.mean(gaps)})
    spreads = {model: seed_spread(model) for model in MODELS}
    record.write(TARGET, {"seeds": list(SEEDS), "seed_spread": spreads, "rows": rows})


if __name__ == "__main__":
    main()
