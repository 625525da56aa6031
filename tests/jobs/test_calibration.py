"""Probes and calibration, at toy size."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stquant.jobs import probes as probing
from stquant.jobs.calibration import calibrate, findings
from stquant.jobs.contenders import contender
from stquant.jobs.data import captions, handwritten_digits
from stquant.jobs.probes import PROBED, Probe, Settings, probes
from stquant.jobs.training import Run
from stquant.jobs.workloads import WORKLOADS
from stquant.policy.factors import NAMES

pytestmark = pytest.mark.filterwarnings("default")

TOY = Settings(models=("clip",), forks=(0.006,), length=2, examples=10, tensors=2)
CELLS = TOY.tensors * sum(map(len, PROBED.values()))

ROUNDING = 1e-5
"""Relative: fp32 losses of order 1, of which means are taken in two orders."""


@pytest.mark.parametrize("model", WORKLOADS)
def test_the_losses_of_examples_have_the_models_loss_as_their_mean(model: str) -> None:
    workload = WORKLOADS[model]
    net = workload.build().eval()
    for batch in (workload.batch(0, 0), workload.validation()[0]):
        with torch.no_grad():
            output = net(**batch)
        losses = workload.losses(output, batch)
        assert losses.shape == (len(batch["input_ids" if "input_ids" in batch else "pixel_values"]),)
        assert float(losses.mean()) == pytest.approx(float(output.loss), rel=ROUNDING)


def test_captions_name_their_digit_and_end_in_zeros() -> None:
    texts = captions()
    assert int((texts[..., -1] == 0).all())
    assert len({bytes(text.tolist()) for text in texts.flatten(0, 1)}) == texts.shape[0] * 10
    assert bytes(texts[0, 7].tolist()).rstrip(b"\0") == b"a photo of the digit seven"


def test_a_clip_batch_has_one_image_of_each_digit() -> None:
    digits = handwritten_digits()
    for images, labels, batch in (
        (digits.train, digits.train_labels, WORKLOADS["clip"].batch(0, 5)),
        (digits.validation, digits.validation_labels, WORKLOADS["clip"].validation()[3]),
    ):
        found = [labels[(images == image).flatten(1).all(1)] for image in batch["pixel_values"]]
        assert [sorted(set(label.tolist())) for label in found] == [[digit] for digit in range(10)]


@pytest.fixture(scope="module")
def made() -> list[Probe]:
    torch.set_num_threads(1)
    return [probe for probe, total in probes(TOY, "clip") if total == CELLS]


def test_every_state_is_probed_at_every_format(made: list[Probe]) -> None:
    assert len({probe.key for probe in made}) == len(made) == CELLS
    assert {(probe.state, probe.format) for probe in made} == {(s, f) for s, formats in PROBED.items() for f in formats}
    assert all(probe.damage >= abs(probe.change) > 0.0 for probe in made)
    assert all(probe.step_error > 0.0 and tuple(probe.factors) == NAMES for probe in made)


def test_fewer_bits_hurt_more(made: list[Probe]) -> None:
    damage = {(probe.tensor, probe.format): probe.damage for probe in made}
    for tensor in {probe.tensor for probe in made}:
        assert damage[tensor, "dynamic2"] > damage[tensor, "mulaw4"]
        assert damage[tensor, "log1"] > damage[tensor, "log3"]


def test_a_state_that_keeps_its_format_does_no_damage() -> None:
    run = Run(WORKLOADS["clip"], contender("8"), steps=500)
    next(run.train())
    fork = probing._Fork.of(run, TOY)
    fork.measured = dict.fromkeys([(fork.tensors[0], "exp_avg", "mulaw8")], (0.0, {}))
    assert fork.probe(fork.tensors[0], "exp_avg", "mulaw8").damage == 0.0


@pytest.mark.parametrize(("format", "moves"), [("dynamic2", True), ("mulaw4", False)])
def test_recoding_prepays_what_a_momentum_loses(format: str, moves: bool) -> None:
    """Without further gradients both end in the same place: the weight plus what the momentum will still add."""
    run = Run(WORKLOADS["clip"], contender("8"), steps=500)
    next(run.train())
    parameter = run.model.get_parameter("text_projection.weight")
    states, before = run.optimizer.state[parameter], parameter.detach().clone()
    states["step"] += 1000  # the first ones prepay less
    momentum = states["exp_avg"].decode()
    probing._recode_(run.optimizer, parameter, "exp_avg", probing.catalog.get(format))
    assert states["exp_avg"].format.name == format
    moved, dropped = before - parameter.detach(), momentum - states["exp_avg"].decode()
    assert bool(moved.any()) == moves
    if moves:
        future = probing._rule(run.optimizer).lr * 0.9 / (1 - 0.9)
        expected = future * dropped / (states["exp_avg_sq"].decode().sqrt() + 1e-8)
        torch.testing.assert_close(moved, expected, rtol=1e-4, atol=1e-6)


class StoppedError(Exception):
    pass


def test_a_stopped_calibration_goes_on_where_it_was(tmp_path: Path, made: list[Probe]) -> None:
    kept = tmp_path / "record.json.partial"

    def stop(model: str, done: int, total: int, probe: Probe) -> None:
        if done == 5:
            raise StoppedError

    with pytest.raises(StoppedError):
        calibrate(TOY, stop, kept)
    assert len(kept.read_text().splitlines()) == 1 + 5
    told: list[tuple[str, int, int]] = []
    with kept.open("a") as file:
        file.write('{"model": "cl')  # the machine went down in the middle of a line
    again = calibrate(TOY, lambda model, done, total, probe: told.append((model, done, total)), kept)
    assert again == made
    assert told == [("clip", done, CELLS) for done in range(1, CELLS + 1)]
    assert [Probe(**json.loads(line)) for line in kept.read_text().splitlines()[1:]] == made
    with pytest.raises(ValueError, match="is of other settings"):
        calibrate(replace(TOY, length=3), stop, kept)


def test_findings_are_plain_data(made: list[Probe]) -> None:
    data = findings(TOY, made)
    assert json.loads(json.dumps(data)) == data
    assert [row["format"] for row in data["formats"]] == [f for formats in PROBED.values() for f in formats]
    for answer in data["questions"].values():
        assert answer["selections"].keys() == {"clip"}
        assert answer["transfers"] == {}
        for scores in answer["rules"].values():
            assert scores["clip"]["r2"] <= scores["clip"]["r2_of_power"] <= 1.0
