"""The frontier: gap to fp32 AdamW over the bytes of the states, one panel for each workload.

Writes docs/frontier.svg from results/evidence_quality.json. Run: python -m benchmarks.evidence.chart
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
from benchmarks.records import load
from matplotlib import pyplot as plt

from .plan import MAIN

TARGET = Path(__file__).parents[2] / "docs" / "frontier.svg"
COLOURS = {"fp32": "#888888", "rival": "#d1495b", "recipe": "#edae49", "ours": "#00798c"}


def draw(found: dict[str, Any], target: Path) -> None:
    """Draw the rows of the main workloads; whiskers are two-sided intervals."""
    # Names and dates that change from run to run would make every drawing another file.
    plt.rcParams.update({"svg.hashsalt": "frontier", "svg.fonttype": "none"})
    figure, axes = plt.subplots(1, len(MAIN), figsize=(15, 5), layout="constrained")
    for axis, workload in zip(axes, MAIN, strict=True):
        rows = [row for row in found["rows"] if row["workload"] == workload and row.get("gap") is not None]
        for row in rows:
            _point(axis, row)
        spread = next((row["spread"] for row in rows if row["spread"] is not None), None)
        if spread is not None:
            axis.axhspan(-found["margin"] * spread, found["margin"] * spread, color="#dddddd", zorder=0)
        axis.axhline(0, color="black", linewidth=0.5)
        axis.set(xscale="log", title=workload, xlabel="state bytes per parameter", ylabel="gap to torch AdamW, fp32")
    figure.legend(
        handles=[plt.Line2D([], [], marker="o", ls="", color=c, label=k) for k, c in COLOURS.items()],
        loc="outside lower center",
        ncols=len(COLOURS),
        frameon=False,
    )
    figure.savefig(target, metadata={"Date": None})
    plt.close(figure)


def _point(axis: Any, row: dict[str, Any]) -> None:
    place = row["state_bytes"] / row["parameters"]
    low, high = row.get("interval", [row["gap"]] * 2) if row["seeds"] > 2 else [row["gap"]] * 2
    whiskers = [[row["gap"] - low], [high - row["gap"]]]
    axis.errorbar(place, row["gap"], whiskers, marker="o", markersize=4, color=COLOURS[row["kind"]], linewidth=1)
    axis.annotate(row["contender"], (place, row["gap"]), fontsize=6, xytext=(3, 3), textcoords="offset points")


if __name__ == "__main__":
    draw(load("evidence_quality"), TARGET)
