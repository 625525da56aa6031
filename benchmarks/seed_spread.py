"""How far the held-out loss of fp32 AdamW moves with the seed: the yardstick of the demo.

Writes the package's own `jobs/seed_spread.json`. Run: python benchmarks/seed_spread.py
"""

import statistics
from pathlib import Path

import stquant
from stquant.jobs.demo import MODELS
from stquant.jobs.parallel import Job, run_all
from stquant.report import record

SEEDS = range(5)
TARGET = Path(stquant.__file__).parent / "jobs" / "seed_spread.json"


def main() -> None:
    jobs = [Job(model, "torch", seed) for model in MODELS for seed in SEEDS]
    results = run_all(
        jobs, lambda job, done, steps, _: done % 100 or print(job.model, job.seed, done, steps, flush=True)
    )
    findings = {}
    for model in MODELS:
        losses = [result["loss"] for result in results if result["model"] == model]
        findings[model] = {
            "optimizer": "torch AdamW, fp32",
            "seeds": list(SEEDS),
            "losses": losses,
            "mean": statistics.mean(losses),
            "spread": statistics.stdev(losses),
        }
    record.write(TARGET, {"workloads": findings})


if __name__ == "__main__":
    main()
