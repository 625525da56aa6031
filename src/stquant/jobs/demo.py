"""The side-by-side comparison: every contender of the demo on every workload."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from stquant.jobs.contenders import DEMO
from stquant.jobs.parallel import Job, Progress, run_all

MODELS = ("gpt2", "vit")
"""The workloads of the demo."""


def demo_jobs(seed: int = 0, steps: int | None = None) -> list[Job]:
    """Return the jobs of the demo, by workload and contender."""
    return [Job(model, optimizer, seed, steps) for model in MODELS for optimizer in DEMO]


def seed_spread(model: str) -> float:
    """Return the recorded standard deviation of fp32 AdamW's loss over seeds, full runs."""
    recorded = json.loads(resources.files("stquant.jobs").joinpath("seed_spread.json").read_text())
    return float(recorded["workloads"][model]["spread"])


def compare(jobs: Sequence[Job], progress: Progress) -> Comparison:
    """Run the jobs, the longest first, and put their results side by side."""
    order = sorted(range(len(jobs)), key=lambda i: jobs[i].optimizer in ("torch", "nadam"))
    results = dict(zip(order, run_all([jobs[i] for i in order], progress), strict=True))
    return Comparison([results[i] for i in range(len(jobs))])


@dataclass(frozen=True, slots=True)
class Comparison:
    """Results of runs; the first of each model is the yardstick.

    Attributes:
        results: What `Run.result` returned.
    """

    results: Sequence[dict[str, Any]]

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per run: loss, gap and seed spread, bits, bytes, and the share saved."""
        rows: list[dict[str, Any]] = []
        for result in self.results:
            yardstick = next(other for other in self.results if other["model"] == result["model"])
            names = ("model", "optimizer", "loss", "true_bits", "state_bytes")
            rows.append(
                {
                    **{name: result[name] for name in names},
                    "gap": result["loss"] - yardstick["loss"],
                    "spread": seed_spread(result["model"]),
                    "saved": 1 - result["state_bytes"] / yardstick["state_bytes"],
                    "last": False,
                }
            )
        for row, following in zip(rows, [*rows[1:], None], strict=True):
            row["last"] = following is None or following["model"] != row["model"]
        return rows

    def to_dict(self) -> dict[str, Any]:
        """Return rows and runs as plain numbers, strings, lists and dicts."""
        return {"rows": self.rows(), "runs": list(self.results)}
