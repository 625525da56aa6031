"""Pictures. Everything that is drawn is in the data that comes in."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
