"""Calibration: probes of several models, and what they say about which factors matter.

Two questions are asked. Across all states and formats of a decision: what tells a harmful choice
from a harmless one? And among the tensors, for each state and format by itself: which tensor needs
more bits than another? What depends on a format alone cancels in the second.

Beside the selected factors stand simple rules, products of powers of factors that could serve as
an allocator's objective as they are. Squared damages of several states add up, so a rule predicts
the damage squared.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stquant.jobs.probes import Probe, Settings, probes
from stquant.policy import selection
from stquant.policy.factors import NAMES
from stquant.policy.selection import Observations

SIZE = 3
"""Factors that are selected."""

POOL = tuple(name for name in NAMES if name != "encode_error_below")
"""What is selected from: the one that is left out tells of another width than the one that was tried."""

STEP_ERROR = {"update_error": 1.0, "signal_to_noise": 1.0, "size": 1.0}
"""Sum of squared errors of the weight's step, up to a constant of the decision."""

RULES: dict[str, Mapping[str, float]] = {
    "relative error of the step": {"update_error": 1.0},
    "squared error of the step": STEP_ERROR,
    "squared error of the step x gradient RMS": {**STEP_ERROR, "gradient_rms": 1.0},
    "squared error of the step x mean squared gradient": {**STEP_ERROR, "gradient_rms": 2.0},
    "relative error of the step x gradient energy": {"update_error": 1.0, "gradient_energy": 1.0},
}

WEIGHTS = ("gradient_rms", "gradient_energy")
"""Factors a power of which could weigh the squared error of the step."""

SPARSE = 0.5
"""Share of zeros in the gradient from which on a tensor counts as one of rare rows."""

QUESTIONS: dict[str, Callable[[Probe], Hashable]] = {
    "states and formats": lambda probe: (probe.model, probe.fork),
    "tensors": lambda probe: (probe.model, probe.fork, probe.state, probe.format),
}
"""Among which probes a damage is told from others."""

Progress = Callable[[str, int, int, Probe], None]
"""Told the model, probes done, probes in all, and the last one."""


def calibrate(settings: Settings, progress: Progress, kept: Path | None = None) -> list[Probe]:
    """Make all probes.

    Args:
        settings: What is probed.
        progress: Told of every probe.
        kept: File that holds the probes made so far; None keeps them in memory only.

    Raises:
        ValueError: `kept` is of other settings.
    """
    known = [] if kept is None else _read(kept, settings)
    done = {probe.key for probe in known}
    made = []
    for model in settings.models:
        for count, (probe, total) in enumerate(probes(settings, model, known), 1):
            made.append(probe)
            if kept is not None and probe.key not in done:
                _append(kept, asdict(probe))
            progress(model, count, total, probe)
    return made


def findings(settings: Settings, made: Sequence[Probe]) -> dict[str, Any]:
    """Return what the probes say, as plain numbers, strings, lists and dicts."""
    told = [probe for probe in made if probe.damage > 0.0]
    return {
        "settings": settings.to_dict(),
        "without_effect": len(made) - len(told),
        "formats": _by_format(told),
        "questions": {question: _answer(told, decision) for question, decision in QUESTIONS.items()},
        "probes": [asdict(probe) for probe in made],
    }


def _answer(made: Sequence[Probe], decision: Callable[[Probe], Hashable]) -> dict[str, Any]:
    """Selection and rules, for each model and for all together."""
    parts = _parts(made)
    dense = [probe for probe in made if probe.factors["zeros"] < SPARSE]
    return {
        "selections": {name: _selected(observed(part, decision)) for name, part in parts.items()},
        "transfers": _transfers(parts, decision) if "all" in parts else {},
        "rules": {
            rule: {name: _score(exponents, observed(part, decision)) for name, part in parts.items()}
            for rule, exponents in RULES.items()
        },
        "weights": _weights(parts, decision) if "all" in parts else {},
        "weights_without_rare_rows": _weights(_parts(dense), decision) if "all" in parts else {},
    }


def _parts(made: Sequence[Probe]) -> dict[str, Sequence[Probe]]:
    """The probes of each model, and `all` of them if there are several models."""
    models = tuple(dict.fromkeys(probe.model for probe in made))
    parts: dict[str, Sequence[Probe]] = {model: [p for p in made if p.model == model] for model in models}
    return {**parts, "all": made} if len(models) > 1 else parts


def _selected(observations: Observations) -> dict[str, Any]:
    found = asdict(selection.select(observations, SIZE))
    plain: dict[str, Any] = json.loads(json.dumps(found))
    return plain


def _transfers(parts: Mapping[str, Sequence[Probe]], decision: Callable[[Probe], Hashable]) -> dict[str, float]:
    """R^2 on each model of factors and exponents that the other models choose."""
    return {
        model: selection.transferred(
            observed([probe for probe in parts["all"] if probe.model != model], decision),
            observed(part, decision),
            SIZE,
        )
        for model, part in parts.items()
        if model != "all"
    }


def _score(exponents: Mapping[str, float], observations: Observations) -> dict[str, float]:
    """How well a rule predicts: with nothing fitted, with its power fitted, and by rank alone."""
    guess = 0.5 * observations.weighted(exponents)
    column = guess[:, None]
    power = selection.fit(column, observations.damage)
    return {
        "r2": selection.predicted(column, observations.damage, column.new_ones(1)),
        "power": float(power),
        "r2_of_power": selection.predicted(column, observations.damage, power),
        "rank_correlation": selection.rank_correlation(guess, observations),
    }


def _weights(parts: Mapping[str, Sequence[Probe]], decision: Callable[[Probe], Hashable]) -> dict[str, Any]:
    """Weigh the squared error of the step by a power of each of `WEIGHTS`, for each model.

    Returns:
        By factor and model: `power`, the one that fits the model's squared damage best; `r2` without
        a weight, `r2_weighted` with that power, `r2_of_others` with the one that fits the other models.
    """
    seen = {name: observed(part, decision) for name, part in parts.items()}
    others = {
        name: observed([probe for probe in parts["all"] if probe.model != name], decision)
        for name in parts
        if name != "all"
    }
    found: dict[str, Any] = {}
    for factor in WEIGHTS:
        powers = {name: _power(part, factor) for name, part in seen.items()}
        found[factor] = {
            name: {
                "power": powers[name],
                "r2": _weighted_r2(part, factor, 0.0),
                "r2_weighted": _weighted_r2(part, factor, powers[name]),
                "r2_of_others": None if name == "all" else _weighted_r2(part, factor, _power(others[name], factor)),
            }
            for name, part in seen.items()
        }
    return found


def _power(observations: Observations, factor: str) -> float:
    """The power of a factor that makes it the best weight of the squared error of the step."""
    weight = 0.5 * observations.weighted({factor: 1.0})
    return float(selection.fit(weight[:, None], observations.damage - 0.5 * observations.weighted(STEP_ERROR)))


def _weighted_r2(observations: Observations, factor: str, power: float) -> float:
    column = 0.5 * observations.weighted({**STEP_ERROR, factor: STEP_ERROR.get(factor, 0.0) + power})[:, None]
    return selection.predicted(column, observations.damage, column.new_ones(1))


def _by_format(made: Sequence[Probe]) -> list[dict[str, Any]]:
    """Per model and format: damage, change of the mean loss, and damage per root of the step's error.

    Damages are geometric means, and relative to that of the whole model the last one is, too.
    """
    rows = []
    for model in dict.fromkeys(probe.model for probe in made):
        of_model = [probe for probe in made if probe.model == model]
        usual = _mean([_per_error(probe) for probe in of_model])
        for name in dict.fromkeys(probe.format for probe in of_model):
            part = [probe for probe in of_model if probe.format == name]
            rows.append(
                {
                    "model": model,
                    "state": part[0].state,
                    "format": name,
                    "damage": math.exp(_mean([math.log(probe.damage) for probe in part])),
                    "change": _mean([probe.change for probe in part]),
                    "per_step_error": math.exp(_mean([_per_error(probe) for probe in part]) - usual),
                }
            )
    return rows


def _per_error(probe: Probe) -> float:
    return math.log(probe.damage) - 0.5 * math.log(probe.step_error)


def observed(made: Sequence[Probe], decision: Callable[[Probe], Hashable]) -> Observations:
    """Return probes as a regression sees them, each among those of its decision."""
    return Observations.of(
        [{name: probe.factors[name] for name in POOL} for probe in made],
        [probe.damage for probe in made],
        [decision(probe) for probe in made],
        [(probe.model, probe.tensor) for probe in made],
    )


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _read(path: Path, settings: Settings) -> list[Probe]:
    """Return the probes of a file, which is made if there is none; a line cut short is dropped."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(settings.to_dict()) + "\n")
    whole = path.read_text().rpartition("\n")[0]
    path.write_text(whole + "\n")
    head, *lines = whole.splitlines()
    if json.loads(head) != settings.to_dict():
        raise ValueError(f"{path} is of other settings ({head}); delete it, or pass the same ones or another --out")
    return [Probe(**json.loads(line)) for line in lines]


def _append(path: Path, row: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")
