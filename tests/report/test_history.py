"""A log arranged for showing, on numbers that are known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stquant.report.charts import POINTS, downsampled, linear, logarithmic
from stquant.report.decisions import Decisions
from stquant.report.history import History
from stquant.report.runlog import read
from tests.report import runs

LOSSES = [(step, 5.0 - step / 10) for step in range(1, 46)]


def history(tmp_path: Path, **options: int | None) -> History:
    return History.of(read(runs.write(tmp_path / "run.jsonl", runs.decisions(**options), LOSSES)))


def test_spans_cover_the_run_without_a_gap(tmp_path: Path) -> None:
    tracks = {(track.parameter, track.state): track for track in history(tmp_path).tracks}
    assert list(tracks) == [
        ("wte & <b>head", "exp_avg"),
        ("wte & <b>head", "exp_avg_sq"),
        ("h.0.mlp", "exp_avg"),
        ("h.0.mlp", "exp_avg_sq"),
    ]
    spans = tracks["wte & <b>head", "exp_avg"].spans
    assert [(span.start, span.stop, span.format, span.width, span.bits) for span in spans] == [
        (0, 10, "dynamic2", 2, 2.25),
        (10, 40, "mulaw4", 4, 4.25),
        (40, 45, "dynamic3", 3, 3.25),
    ]
    assert [(span.start, span.stop) for span in tracks["h.0.mlp", "exp_avg"].spans] == [(0, 45)]


def test_bytes_by_width_add_up(tmp_path: Path) -> None:
    run = history(tmp_path)
    assert [(held.step, held.widths, held.beside) for held in run.holdings] == [
        (0, {1: 320, 2: 576}, 8),
        (10, {1: 320, 2: 288, 4: 544}, 8),
        (20, {1: 320, 2: 288, 4: 544}, 8),
        (40, {1: 320, 2: 288, 3: 416}, 8),
    ]
    assert [held.bytes for held in run.holdings[1:]] == list(run.pools[0].bytes) == [1160, 1160, 1032]
    assert run.bits == 8 * (320 + 288 + 416) / 4096


def test_damage_is_relative_to_what_moved(tmp_path: Path) -> None:
    pool = history(tmp_path).pools[0]
    assert pool.predicted == pytest.approx((0.055,) * 3)
    assert pool.measured == pytest.approx((0.08,) * 3)


def test_more_bytes_than_allowed_are_found(tmp_path: Path) -> None:
    assert history(tmp_path, budget=1100).exceeded == (10, 20)
    assert history(tmp_path, budget=1160).exceeded == ()
    assert history(tmp_path, budget=None).exceeded == ()
    assert history(tmp_path, budget=None).holdings[0].budget is None


def test_a_real_run_has_its_ledger_bytes(tmp_path: Path) -> None:
    from stquant.report.runlog import RunLog

    params, optimizer = runs.toy()
    with RunLog(tmp_path / "run.jsonl").attach(optimizer):
        runs.steps(optimizer, params, 1, 4)
    run = History.of(read(tmp_path / "run.jsonl"))
    assert run.holdings[-1].bytes == optimizer.ledger().bytes
    rows = {(row.parameter, row.state): row for row in optimizer.ledger().rows}
    for track in run.tracks:
        row = rows[track.parameter, track.state]
        assert (track.spans[-1].format, track.spans[-1].bits) == (row.format, row.bits)
    json.dumps(run.to_dict(), allow_nan=False)
    text = str(optimizer.decisions())
    assert all(part in text for part in ("body.weight", "head.weight", "exp_avg_sq", "states changed"))


def test_decisions_print_what_changed_and_why() -> None:
    lines = str(Decisions(runs.decisions()[:1])).splitlines()
    assert lines == [
        "step 10, Budget(bits=2.0): 1,160 bytes of 1,100, 1 of 4 states changed, error of the step expected 5.5 %",
        "parameter      state       format              bytes  expected  measured  why",
        "wte & <b>head  exp_avg     dynamic2 to mulaw4    544       1 %       2 %  raised: saves <b>much</b> & more",
        "wte & <b>head  exp_avg_sq  log1                  160       1 %       2 %  kept",
        "h.0.mlp        exp_avg     dynamic2              288     2.5 %       2 %  kept",
        "h.0.mlp        exp_avg_sq  log1                  160       1 %       2 %  kept",
    ]
    assert str(Decisions()).startswith("no decision yet")


@pytest.mark.parametrize(
    ("scale", "ticks"),
    [
        (linear(0, 600), [0, 200, 400, 600]),
        (linear(1.6, 5.3), [2, 3, 4, 5]),
        (linear(0, 1), [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (linear(3, 3), [2.6, 2.8, 3.0, 3.2, 3.4]),
        (logarithmic(0.02, 0.14), [0.02, 0.05, 0.1]),
        (logarithmic(1e-6, 1.0), [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0]),
    ],
    ids=str,
)
def test_ticks_are_few_and_round(scale: object, ticks: list[float]) -> None:
    assert scale.ticks() == pytest.approx(ticks)  # type: ignore[attr-defined]


def test_long_lines_lose_points_but_not_their_mean() -> None:
    points = [(step, float(step % 7)) for step in range(1, 4 * POINTS + 1)]
    fewer, each = downsampled(points)
    assert (len(fewer), each, fewer[-1][0]) == (POINTS, 4, 4 * POINTS)
    assert sum(v for _, v in fewer) / POINTS == pytest.approx(sum(v for _, v in points) / len(points))
    assert downsampled([]) == ([], 1)
