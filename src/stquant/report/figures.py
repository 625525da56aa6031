"""Pictures. Everything that is drawn is in the data that comes in."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from stquant.report.history import History, Pool, Track

WIDTH_COLOURS = {
    0: "#ffffd9",
    1: "#edf8b1",
    2: "#c7e9b4",
    3: "#7fcdbb",
    4: "#41b6c4",
    5: "#1878a3",
    6: "#225ea8",
    8: "#081d58",
}
"""Few bits light, many dark, in an order that readers with any colour vision see; after ColorBrewer's YlGnBu."""

_BESIDE, _LINE, _MARK = "#cbd2d9", "#1864ab", "#c2410c"
_DARK_FROM = 5
_ROW_INCHES, _MOST_INCHES = 0.19, 36.0
_COLOURS = ("#1f2933", "#9aa5b1", "#d9480f", "#1971c2", "#2f9e44", "#862e9c")
_DASHES = ("-", "--", "-", "-.", ":", "-")


def loss_curves(runs: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw held-out losses over steps, one panel per model, and write a PNG.

    Args:
        runs: Results with `model`, `optimizer`, `true_bits` and `curve`.
        path: Where the picture goes.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    models = list(dict.fromkeys(run["model"] for run in runs))
    figure, axes = pyplot.subplots(1, len(models), figsize=(5.2 * len(models), 3.8), squeeze=False)
    for axis, model in zip(axes[0], models, strict=True):
        chosen = [run for run in runs if run["model"] == model]
        for run, colour, dash in zip(chosen, _COLOURS, _DASHES, strict=False):
            label = f"{run['optimizer']} ({run['true_bits']:.1f} bits)"
            axis.plot(run["curve"]["steps"], run["curve"]["losses"], dash, color=colour, label=label, linewidth=1.6)
        axis.set_title(model)
        axis.set_xlabel("step")
        axis.set_ylabel("held-out loss")
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter(matplotlib.ticker.ScalarFormatter())
        axis.yaxis.set_minor_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
        axis.tick_params(axis="y", which="minor", labelsize=7)
        axis.grid(True, which="both", alpha=0.2)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)
    pyplot.close(figure)


def history(run: History, title: str, path: Path) -> None:
    """Draw loss, bits, bytes and damage of a run over one axis of steps, and write a PNG.

    Args:
        run: What is drawn.
        title: Stands above.
        path: Where the picture goes.

    Raises:
        ValueError: The run has neither a decision nor a loss.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = [(2.0, _losses)] if run.losses else []
    if run.tracks:
        height = min(_ROW_INCHES * len(run.tracks), _MOST_INCHES)
        panels += [(height, _bits), (2.0, _bytes), (2.0, _damage)]
    if not panels:
        raise ValueError("the run log has neither decisions nor losses; there is nothing to draw")
    heights = [height for height, _ in panels]
    figure, axes = pyplot.subplots(
        len(panels),
        1,
        figsize=(11, sum(heights) + 0.75 * len(panels) + 0.4),
        sharex=True,
        squeeze=False,
        height_ratios=heights,
        layout="constrained",
    )
    for axis, (_, draw) in zip(axes[:, 0], panels, strict=True):
        draw(axis, run)
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_xlim(0, max(1, run.end))
    axes[-1, 0].set_xlabel("step")
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _losses(axis: Any, run: History) -> None:
    axis.plot(*zip(*run.losses, strict=True), color=_LINE, linewidth=1.0)
    axis.set_title("training loss", loc="left", fontsize=10)
    axis.grid(True, axis="y", alpha=0.25)


def _bits(axis: Any, run: History) -> None:
    """Rows are states, grouped by tensor: the name stands left of a group, the state right of its row."""
    from matplotlib.patches import Patch

    tensors: dict[str, list[int]] = {}
    for row, track in enumerate(run.tracks):
        tensors.setdefault(track.parameter, []).append(row)
        _strip(axis, row, track, run.end)
    for rows in list(tensors.values())[1:]:
        axis.axhline(rows[0] - 0.5, color="white", linewidth=2.5)
    size = max(3.0, min(8.0, 72 * _MOST_INCHES / len(run.tracks)))
    axis.set_yticks([sum(rows) / len(rows) for rows in tensors.values()], list(tensors), fontsize=size)
    right = axis.twinx()
    right.set_yticks(range(len(run.tracks)), [track.state for track in run.tracks], fontsize=min(7.0, size))
    for one in (axis, right):
        one.set_ylim(len(run.tracks) - 0.5, -0.5)
        one.tick_params(axis="y", length=0)
        one.spines[:].set_visible(False)
    widths = sorted({span.width for track in run.tracks for span in track.spans})
    axis.set_title("bits of a code", loc="left", fontsize=10)
    handles = [Patch(facecolor=_colour(width), edgecolor=_BESIDE, label=str(width)) for width in widths]
    axis.legend(handles=handles, ncols=len(widths), frameon=False, fontsize=8, loc="lower right", bbox_to_anchor=(1, 1))


def _strip(axis: Any, row: int, track: Track, end: int) -> None:
    for span in track.spans:
        length = span.stop - span.start
        axis.barh(row, length, left=span.start, height=0.92, color=_colour(span.width), linewidth=0)
        if length >= 0.025 * end:
            ink = "white" if span.width >= _DARK_FROM else "black"
            axis.text(span.start + length / 2, row, span.width, ha="center", va="center", fontsize=7, color=ink)


def _bytes(axis: Any, run: History) -> None:
    steps = [*(held.step for held in run.holdings), run.end]
    last = run.holdings[-1]
    widths = sorted({width for held in run.holdings for width in held.widths})
    layers = [[held.beside for held in run.holdings]]
    layers += [[held.widths.get(width, 0) for held in run.holdings] for width in widths]
    colours = [_BESIDE, *map(_colour, widths)]
    labels = ["fp32, step counts, residuals", *("_" for _ in widths)]  # matplotlib leaves out "_": colours as above
    extended = [[*layer, layer[-1]] for layer in layers]
    axis.stackplot(steps, extended, colors=colours, labels=labels, step="post", edgecolor="white", linewidth=0.4)
    title = f"bytes: {last.bytes:,}"
    if last.budget is not None:
        budgets = [held.budget for held in (*run.holdings, last)]
        axis.step(steps, budgets, where="post", color=_MARK, linestyle="--", linewidth=1.5, label="budget")
        title += f" of {last.budget:,} at the end"
    axis.set_title(title, loc="left", fontsize=10)
    axis.yaxis.set_major_formatter(_size)
    axis.set_ylim(0, 1.08 * max(max(held.bytes, held.budget or 0) for held in run.holdings))
    axis.legend(frameon=False, fontsize=8, ncols=2, loc="lower right", bbox_to_anchor=(1, 1))


def _damage(axis: Any, run: History) -> None:
    """What a decision expects holds until the next one, which measures it."""
    for pool, colour in zip(run.pools, itertools.cycle((_LINE, *_COLOURS[4:])), strict=False):
        named = f" ({pool.policy})" if len(run.pools) > 1 else ""
        _pool(axis, run, pool, colour, named)
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter(_percent)
    axis.yaxis.set_minor_formatter(_percent)
    axis.tick_params(axis="y", which="minor", labelsize=7)
    axis.set_title("squared error of the step of the weights, relative", loc="left", fontsize=10)
    axis.grid(True, axis="y", which="both", alpha=0.25)
    axis.legend(frameon=False, fontsize=8, ncols=4, loc="lower right", bbox_to_anchor=(1, 1))


def _pool(axis: Any, run: History, pool: Pool, colour: str, named: str) -> None:
    steps, expected = [*pool.steps, run.end], [*pool.predicted, pool.predicted[-1]]
    axis.step(steps, expected, where="post", color=colour, linewidth=1.5, label="expected" + named)
    points = [(step, value) for step, value in zip(pool.steps, pool.measured, strict=True) if value is not None]
    if points:
        axis.plot(*zip(*points, strict=True), "o", color=_MARK, markersize=4, clip_on=False, label="measured" + named)


def _colour(width: int) -> str:
    """Colour of a width; the darkest for all that have none of their own."""
    return WIDTH_COLOURS.get(width, WIDTH_COLOURS[8])


def _size(value: float, _: int) -> str:
    return decimal(int(value))


def _percent(value: float, _: int) -> str:
    return f"{100 * value:.3g} %"
