"""A run as one HTML page that needs nothing else: no network, no script, no other file.

Text and strips are HTML, so that they stay readable at any width; only lines and areas are SVG. What is drawn is
also said: in the alternative texts of the pictures, and in tables.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from stquant.report.charts import Scale, downsampled, linear, logarithmic
from stquant.report.decisions import share
from stquant.report.history import Change, History, Holding, Pool, Span, Track

LAST_CHANGES = 50

NUMBERED = 0.05
"""Share of a run from which on a part of a strip has room for a digit, on a phone."""

_TEMPLATE = Path(__file__).with_name("page.html")


def render(history: History, name: str) -> str:
    """Return the page.

    Args:
        history: What is shown.
        name: Of the run, for the title.
    """
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    return environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(_view(history, name))


def _view(history: History, name: str) -> dict[str, Any]:
    x = linear(0, max(1, history.end))
    changed = list(reversed(history.changes))
    widths = sorted({span.width for track in history.tracks for span in track.spans})
    return {
        "title": f"{name}: formats of {history.optimizer}",
        "lead": "Which format each state had, when it changed and why.",
        "exceeded": [f"{step:,}" for step in history.exceeded],
        "tiles": _tiles(history),
        "loss": _loss_chart(history, x) if history.losses else None,
        "steps": _marks(x, _count),
        "widths": [(_css(width), _bits(width)) for width in widths],
        "tensors": _tensors(history),
        "changed": len({change.decision.parameter for change in history.changes}),
        "bytes": _bytes_chart(history, x) if history.holdings else None,
        "damages": [_damage_chart(pool, x) for pool in history.pools],
        "changes": [_change_row(change) for change in changed[:LAST_CHANGES]],
        "total_changes": len(changed),
        "footer": _footer(history),
    }


def _tiles(history: History) -> list[tuple[str, str, str]]:
    tiles = [("steps", f"{history.end:,}", "")]
    if history.losses:
        tiles.append(("last training loss", f"{history.losses[-1][1]:.4g}", ""))
    if history.pools:
        held = history.holdings[-1]
        taken = sum(len(pool.steps) for pool in history.pools)
        of = "no limit" if held.budget is None else f"of {decimal(held.budget)}"
        tiles += [
            ("policy", ", ".join(pool.policy for pool in history.pools), ""),
            ("bytes", decimal(held.bytes), of),
            ("bits of adapting states", f"{history.bits:.2f}", ""),
            (
                "changes",
                f"{len(history.changes):,}",
                f"in {taken:,} decisions",
            ),
            ("expected damage", share(history.pools[0].predicted[-1]), "of the squared step"),
        ]
    return tiles


def _loss_chart(history: History, x: Scale) -> dict[str, Any]:
    points, each = downsampled([(step, loss) for step, loss in history.losses if math.isfinite(loss)])
    losses = [loss for _, loss in points] or [0.0]
    y = linear(min(losses), max(losses))
    lost = sum(not math.isfinite(loss) for _, loss in history.losses)
    return {
        "caption": "Training loss"
        + (f", means of {each} steps" if each > 1 else "")
        + (f"; {lost:,} losses were not finite" if lost else ""),
        "alt": f"Training loss, from {losses[0]:.4g} to {losses[-1]:.4g} after {history.end:,} steps",
        "legend": [],
        "x": _marks(x, _count),
        "y": _marks(y, lambda value: f"{value:g}"),
        "paths": [("", _path([(x(step), y(loss)) for step, loss in points]))],
    }


def _bytes_chart(history: History, x: Scale) -> dict[str, Any]:
    """Areas on top of each other, one for each width; each holding lasts until the next."""
    last = history.holdings[-1]
    tops = [max(held.bytes, held.budget or 0) for held in history.holdings]
    y = linear(0, 1.05 * max(tops))
    widths = sorted({width for held in history.holdings for width in held.widths})
    layers: list[tuple[str, Callable[[Holding], int]]] = [("beside", lambda held: held.beside)]
    layers += [(_css(width), lambda held, width=width: held.widths.get(width, 0)) for width in widths]  # type: ignore[misc]
    floor = [0] * len(history.holdings)
    paths = []
    for css, part in layers:
        top = [below + part(held) for below, held in zip(floor, history.holdings, strict=True)]
        upper, lower = (_stairs(history, values, x, y) for values in (top, floor))
        paths.append((f"area {css}", _path([*upper, *reversed(lower)]) + "Z"))
        floor = top
    legend = [("beside", "fp32 states, step counts, residuals"), *((_css(w), _bits(w)) for w in widths)]
    caption = f"Bytes by width of the codes. At the end {last.bytes:,} bytes"
    if last.budget is not None:
        budgets = [held.budget or 0 for held in history.holdings]
        paths.append(("limit", _path(_stairs(history, budgets, x, y))))
        legend.append(("limit", "budget"))
        caption += f" of {last.budget:,} allowed, {100 * last.bytes / last.budget:.1f} %"
    return {
        "caption": caption + ".",
        "alt": caption + "; the most over the run was " + f"{max(held.bytes for held in history.holdings):,}.",
        "legend": legend,
        "x": _marks(x, _count),
        "y": _marks(y, lambda value: decimal(int(value))),
        "paths": paths,
    }


def _damage_chart(pool: Pool, x: Scale) -> dict[str, Any]:
    """What a decision expects holds until the next one, which measures it."""
    measured = [(step, value) for step, value in zip(pool.steps, pool.measured, strict=True) if value]
    expected = [(step, value) for step, value in zip(pool.steps, pool.predicted, strict=True) if value > 0]
    values = [value for _, value in measured + expected if math.isfinite(value)] or [1.0]
    y = logarithmic(min(values), max(values))
    ends = [step for step, _ in expected[1:]] + [x.high]
    stairs = [
        point for (step, value), end in zip(expected, ends, strict=True) for point in ((step, value), (end, value))
    ]
    last = share(pool.measured[-1])
    return {
        "policy": pool.policy,
        "caption": "Squared error that the formats make in the step of the weights, relative to the squared step. "
        "A dot is measured before a decision; the line is what the decision expects of its formats.",
        "alt": f"Damage over steps: at the last decision measured {last}, expected {share(pool.predicted[-1])}",
        "legend": [("line", "expected"), ("dot", "measured")],
        "x": _marks(x, _count),
        "y": _marks(y, share),
        "paths": [
            ("", _path([(x(step), y(value)) for step, value in stairs])),
            ("dots", "".join(f"M{x(step):.2f} {100 - y(value):.2f}h0" for step, value in measured)),
        ],
    }


def _tensors(history: History) -> list[dict[str, Any]]:
    """The tracks by tensor."""
    names = dict.fromkeys(track.parameter for track in history.tracks)
    grouped: dict[str, list[Track]] = {name: [] for name in names}
    for track in history.tracks:
        grouped[track.parameter].append(track)
    changes: dict[str, list[str]] = {name: [] for name in names}
    for change in history.changes:
        state = change.decision
        changes[state.parameter].append(f"step {change.step:,}, {state.state}: {state.old} to {state.new}; {state.why}")
    return [
        {
            "name": name,
            "changes": changes[name],
            "strips": [_strip(track) for track in tracks],
            "rows": _rows(tracks),
        }
        for name, tracks in grouped.items()
    ]


def _strip(track: Track) -> dict[str, Any]:
    said = [f"{span.format} from step {span.start:,}" for span in track.spans]
    return {
        "state": track.state,
        "alt": f"{track.state}: {', then '.join(said)}",
        "bits": f"{track.spans[-1].bits:.2f}",
        "parts": [_part(span, track.spans[-1].stop) for span in track.spans],
    }


def _part(span: Span, end: int) -> tuple[str, int, str, str]:
    """Class, length, text and hint of a part of a strip; the text only where there is room for it."""
    length = max(span.stop - span.start, 1)
    text = str(span.width) if length >= NUMBERED * end else ""
    return _css(span.width), length, text, f"steps {span.start:,} to {span.stop:,}: {span.format}, {span.bits:.2f} bits"


def _rows(tracks: Sequence[Track]) -> list[tuple[str, list[str]]]:
    """The table of a tensor: what was decided last, then the factors."""
    rows = [
        ("format", [track.last.new for track in tracks]),
        ("elements", [f"{track.elements:,}" for track in tracks]),
        ("bytes", [f"{track.last.new_bytes:,}" for track in tracks]),
        ("expected damage", [share(track.predicted) for track in tracks]),
        ("measured damage", [share(track.measured) for track in tracks]),
        ("why", [track.last.why for track in tracks]),
    ]
    factors = dict.fromkeys(name for track in tracks for name in track.last.factors)
    for name in factors:
        values = [track.last.factors.get(name, math.nan) for track in tracks]
        rows.append((name.replace("_", " "), [_factor(value) for value in values]))
    return rows


def _factor(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _change_row(change: Change) -> tuple[str, str, str, str, str]:
    state = change.decision
    return f"{change.step:,}", state.parameter, state.state, f"{state.old} to {state.new}", state.why


def _footer(history: History) -> str:
    packages = history.conditions.get("packages", {})
    return ", ".join(f"{name} {version}" for name, version in packages.items())


def _stairs(history: History, values: Sequence[int], x: Scale, y: Scale) -> list[tuple[float, float]]:
    """Values that each last until the next, in percent of the picture."""
    starts = [held.step for held in history.holdings]
    ends = [*starts[1:], x.high]
    return [
        (x(step), y(value)) for start, end, value in zip(starts, ends, values, strict=True) for step in (start, end)
    ]


def _path(points: Sequence[tuple[float, float]]) -> str:
    """Lines between points in percent; y grows upwards."""
    return "M" + "L".join(f"{x:.2f} {100 - y:.2f}" for x, y in points) if points else ""


def _marks(scale: Scale, label: Callable[[float], str]) -> list[tuple[float, str]]:
    return [(round(scale(value), 2), label(value)) for value in scale.ticks()]


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _css(width: int) -> str:
    """Class of a width; there is one for each that the catalogue has, and 8 for all above."""
    return f"w{min(width, 8) if width != 7 else 8}"


def _bits(width: int) -> str:
    return f"{width} bit" if width == 1 else f"{width} bits"
