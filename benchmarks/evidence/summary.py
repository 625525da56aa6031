"""From runs to gaps: paired by seed, with their uncertainty and what follows from it."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from typing import Any

from scipy import stats

from .plan import CONFIDENCE, MARGIN, YARDSTICK

Runs = Sequence[dict[str, Any]]


def summarize(runs: Runs) -> dict[str, Any]:
    """Return one row for each workload and contender, in the order in which they were first run."""
    pairs = list(dict.fromkeys((run["workload"], run["contender"]) for run in runs))
    workloads = list(dict.fromkeys(workload for workload, _ in pairs))
    rows = [_row(w, c, runs) for w, (other, c) in itertools.product(workloads, pairs) if w == other]
    return {"margin": MARGIN, "confidence": CONFIDENCE, "rows": rows, "beaten": beaten(runs, rows)}


def _row(workload: str, contender: str, runs: Runs) -> dict[str, Any]:
    own = [run for run in runs if (run["workload"], run["contender"]) == (workload, contender)]
    row = {"workload": workload, "contender": contender, "kind": own[0]["kind"], "seeds": len(own)}
    if "missing" in own[0]:
        return row | {"missing": own[0]["missing"]}
    base = losses(runs, workload, YARDSTICK)
    spread = statistics.stdev(base.values()) if len(base) > 1 else None
    mine = losses(runs, workload, contender)
    gaps = [mine[seed] - base[seed] for seed in mine if seed in base]
    held = {key: own[0][key] for key in ("parameters", "weight_bytes", "residual_bytes", "state_bytes", "packed_bits")}
    return {
        **row,
        **held,
        "bits": 4 * held["state_bytes"] / held["parameters"],
        "diverged": len(own) - len(mine),
        "loss": statistics.mean(mine.values()) if mine else None,
        "spread": spread,
        **(judged(gaps, spread) if contender != YARDSTICK else {}),
    }


def losses(runs: Runs, workload: str, contender: str) -> dict[int, float]:
    """Return the final losses by seed; runs that diverged have none."""
    return {
        run["seed"]: run["loss"]
        for run in runs
        if (run["workload"], run["contender"]) == (workload, contender) and run.get("loss") is not None
    }


def judged(gaps: Sequence[float], spread: float | None) -> dict[str, Any]:
    """Return a gap's mean, its bounds, and the verdicts.

    Args:
        gaps: Loss minus the yardstick's, one for each seed.
        spread: Standard deviation of the yardstick over seeds.
    """
    if len(gaps) < 2:
        return {"gap": gaps[0] if gaps else None, "verdict": "too few seeds"}
    mean, error = statistics.mean(gaps), statistics.stdev(gaps) / len(gaps) ** 0.5
    one_sided = mean + error * float(stats.t.ppf(CONFIDENCE, len(gaps) - 1))
    half = error * float(stats.t.ppf(0.5 + CONFIDENCE / 2, len(gaps) - 1))
    inferior = None if spread is None else one_sided >= MARGIN * spread
    verdict = "better" if mean + half < 0 else "worse" if mean - half > 0 else "not significant"
    return {
        "gap": mean,
        "gap_deviation": statistics.stdev(gaps),
        "upper": one_sided,
        "interval": [mean - half, mean + half],
        "non_inferior": None if inferior is None else not inferior,
        "verdict": verdict,
    }


def beaten(runs: Runs, rows: Runs) -> list[dict[str, Any]]:
    """Return where a contender that holds no more bytes is significantly better than one of ours."""
    found = []
    there = [row for row in rows if "missing" not in row]
    for ours, other in itertools.product(there, there):
        if ours["kind"] != "ours" or ours is other or other["kind"] == "ours" or other["workload"] != ours["workload"]:
            continue
        if _bytes(other) > _bytes(ours):
            continue
        mine, theirs = (losses(runs, ours["workload"], row["contender"]) for row in (ours, other))
        verdict = judged([theirs[seed] - mine[seed] for seed in theirs if seed in mine], None)
        if verdict["verdict"] == "better":
            found.append({"workload": ours["workload"], "ours": ours["contender"], "by": other["contender"], **verdict})
    return found


def _bytes(row: dict[str, Any]) -> int:
    """Bytes of weights, residuals and states."""
    return int(row["weight_bytes"] + row["residual_bytes"] + row["state_bytes"])
