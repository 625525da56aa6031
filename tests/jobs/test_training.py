"""The example job, a few steps of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stquant.errors import FormatError
from stquant.jobs.contenders import DEMO, contender
from stquant.jobs.data import handwritten_digits, standard_library_text
from stquant.jobs.demo import MODELS, Comparison, compare, demo_jobs, seed_spread
from stquant.jobs.parallel import Job
from stquant.jobs.workloads import WORKLOADS
from stquant.report.figures import loss_curves

pytestmark = pytest.mark.filterwarnings("default")


def test_text_is_real_and_split() -> None:
    text = standard_library_text()
    assert len(text.train) > 5_000_000
    assert 200_000 < len(text.validation) < len(text.train) / 5
    assert b"import " in bytes(text.validation[:100_000].tolist())


def test_digits_are_real_and_split() -> None:
    digits = handwritten_digits()
    assert digits.train.shape == (4000, 1, 28, 28)
    assert digits.validation.shape == (1000, 1, 28, 28)
    assert set(digits.validation_labels.tolist()) == set(range(10))
    assert 0.1 < float(digits.train.mean()) < 0.2


@pytest.mark.parametrize("model", WORKLOADS)
def test_a_resumed_run_equals_one_that_never_stopped(model: str, tmp_path: Path) -> None:
    job = Job(model, "2+0", seed=3, steps=4, dtype="bfloat16")
    straight = job.run()
    for _ in straight.train():
        if straight.done == 2:
            straight.save(tmp_path / "checkpoint.pt")
    resumed = job.run()
    resumed.resume(tmp_path / "checkpoint.pt")
    assert resumed.done == 2
    list(resumed.train())
    assert resumed.curve == straight.curve
    for a, b in zip(straight.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(ValueError, match="pass the same --model, --seed and --steps"):
        Job(model, "2+0", seed=4, steps=4).run().resume(tmp_path / "checkpoint.pt")


@pytest.mark.parametrize("text", [*DEMO, "fp32", "8", "dynamic3+log2", "fp32+log1", "sgd:dynamic2", "lion:4"])
def test_every_contender_takes_a_step(text: str) -> None:
    run = Job("vit", text, steps=2).run()
    losses = list(run.train())
    assert len(losses) == 2
    result = run.result()
    assert result["state_bytes"] > 0
    assert (result["true_bits"] == pytest.approx(32, abs=0.1)) == (text in ("torch", "nadam", "fp32"))


@pytest.mark.parametrize("text", ["", "3+2+1", "two", "2+", "9", "log4+mulaw4", "rmsprop:4", "sgd:2+1"])
def test_unknown_contenders_raise(text: str) -> None:
    with pytest.raises(FormatError):
        contender(text).make(torch.nn.Linear(64, 64).named_parameters(), WORKLOADS["gpt2"])


def test_the_comparison_is_run_side_by_side(tmp_path: Path) -> None:
    jobs = demo_jobs(steps=2)
    assert [(job.model, job.optimizer) for job in jobs] == [(m, o) for m in MODELS for o in DEMO]
    chosen = [job for job in jobs if job.model == "vit" and job.optimizer in ("torch", "2+0")]
    told: list[tuple[Job, int, int]] = []
    comparison = compare(chosen, lambda job, done, steps, loss: told.append((job, done, steps)))
    assert sorted(told, key=str) == sorted([(job, 2, 2) for job in chosen], key=str)
    rows = comparison.rows()
    assert rows[0]["gap"] == 0.0
    assert rows[1]["saved"] > 0.9
    assert rows[1]["spread"] == seed_spread("vit") > 0
    loss_curves(comparison.results, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert Comparison(comparison.results).to_dict()["rows"] == rows
