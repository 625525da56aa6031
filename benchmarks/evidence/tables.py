"""The comparison as tables: gaps, what is beaten, rates, and what it took."""

from __future__ import annotations

from typing import Any

from benchmarks.records import exists, load, table

from .plan import FILES


def gaps(name: str, *workloads: str) -> str:
    """Every contender's gap to fp32 AdamW, on some workloads or on all of a file."""
    found = load(f"evidence_{name}")
    chosen = [row for row in found["rows"] if not workloads or row["workload"] in workloads]
    head = ["contender", "seeds", "state bytes per parameter", "bits, packed states", "held-out loss"]
    head += ["gap", "upper bound", "margin", "shown non-inferior", "gap is"]
    if len({row["workload"] for row in chosen}) > 1:
        return table(["workload, " + head[0], *head[1:]], [_contender(row, True, found) for row in chosen])
    return table(head, [_contender(row, False, found) for row in chosen])


def _contender(row: dict[str, Any], with_workload: bool, found: dict[str, Any]) -> list[str]:
    name = f"{row['workload']}, {row['contender']}" if with_workload else row["contender"]
    if "missing" in row:
        return [name, *["-"] * 8, f"not run: {row['missing'].split(':')[0]}"]
    held = f"{row['state_bytes'] / row['parameters']:.3f}"
    packed = "" if row["packed_bits"] is None else f"{row['packed_bits']:.2f}"
    loss = "diverged" if row["loss"] is None else f"{row['loss']:.4f}"
    start = [name, str(row["seeds"]), held, packed, loss]
    if row.get("gap") is None:
        return [*start, *[""] * 5]
    margin = "" if row["spread"] is None else f"{found['margin'] * row['spread']:.4f}"
    bound = f"{row['upper']:+.4f}" if "upper" in row else ""
    verdict = {None: "", True: "yes", False: "no"}[row.get("non_inferior")]
    return [*start, f"{row['gap']:+.4f}", bound, margin, verdict, row["verdict"]]


def beaten() -> str:
    """Where a contender that holds no more bytes is significantly better than one of ours."""
    rows = [
        [f"{row['workload']}, {row['ours']}", row["by"], f"{row['gap']:+.4f}", f"{row['interval'][1]:+.4f}"]
        for name in FILES
        if exists(f"evidence_{name}")
        for row in load(f"evidence_{name}")["beaten"]
    ]
    return table(["ours", "beaten by", "difference of loss", "upper bound"], rows or [["none", "", "", ""]])


def tuning() -> str:
    """Held-out losses of fp32 AdamW by learning rate and b1."""
    rows = [[f"{run['workload']}, {run['contender']}", f"{run['loss']:.4f}"] for run in load("evidence_tuning")["runs"]]
    return table(["workload@rate, optimizer", "held-out loss"], sorted(rows))


def plan() -> str:
    """What is registered to be run."""
    rows = [
        [f"`evidence_{name}.json`", evidence.question, str(len(list(evidence.cells()))), str(evidence.minutes)]
        for name, evidence in FILES.items()
    ]
    total = sum(evidence.minutes for evidence in FILES.values())
    return table(["file", "question", "runs", "core-minutes planned"], [*rows, ["all", "", "", str(total)]])


def cost() -> str:
    """Core-minutes that each file of evidence took."""
    rows = []
    for name in FILES:
        if not exists(f"evidence_{name}"):
            rows.append([name, "not run yet", ""])
            continue
        runs = load(f"evidence_{name}")["runs"]
        minutes = sum(run.get("cpu_seconds", 0.0) for run in runs) / 60
        rows.append([name, str(len(runs)), f"{minutes:.0f}"])
    return table(["evidence", "runs", "core-minutes"], rows)
