"""Factors: named quantities of one state that may say how many bits it needs.

Each is computed from the energies that the kernels measure on a sample of a step (see
`kernels.reference.measurement`), in double. With x a state's new value, Q(x) what its present format
keeps of it, u the step of the weight, E[] a mean over the sample and a bar the size-weighted
mean over the tensors measured in the same step:

| factor | formula | range | source |
|---|---|---|---|
| `encode_error` | E[(x - Q(x))^2] / E[x^2] | 0 and up | |
| `encode_error_below` | the same, one format below | 0 and up | |
| `update_error` | E[(u(Q(x)) - u)^2] / E[u^2] | 0 and up | docs/policy.md |
| `saturated` | share of codes on the outermost levels | 0 to 1 | |
| `crest` | largest magnitude of a block over its root mean square, both as energies | 1 to sqrt(block) | |
| `kurtosis` | E[x^4 / (block's E[x^2])^2] | 1 to block | |
| `swamping` | rms change in a step over the distance of codes, sqrt(12 E[(x - Q(x))^2]) | 0 and up | |
| `radial_bias` | E[(Q(x) - x) x] / E[x^2] | -1 to 1 | |
| `signal_to_noise` | E[u^2] relative to its mean | 0 and up | |
| `gradient_rms` | sqrt(E[g^2]) over its moving average over all tensors | 0 and up | arXiv 2604.06836 |
| `gradient_dispersion` | std[|g|] / E[|g|] over its moving average | 0 and up | arXiv 2604.06836 |
| `gradient_energy` | sum of g^2, as a share of that of all tensors | 0 to 1 | |
| `zeros` | share of zeros in the gradient | 0 to 1 | |
| `size` | elements | | |
| `fan_in` | elements of a row | | |
| `depth` | position among the optimizer's tensors | 0 to 1 | |

A measurement costs one sample for all of them, whose size does not grow with the tensor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

NAMES = (
    "encode_error",
    "encode_error_below",
    "update_error",
    "saturated",
    "crest",
    "kurtosis",
    "swamping",
    "radial_bias",
    "signal_to_noise",
    "gradient_rms",
    "gradient_dispersion",
    "gradient_energy",
    "zeros",
    "size",
    "fan_in",
    "depth",
)
"""The factors, in the order of the table above."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One state of one tensor as it was measured.

    Attributes:
        state: The state's name.
        formats: Names of the formats that it could have, by growing width.
        present: Position in `formats` of the one it has.
        energies: By name, as `kernels.reference.measure.names` lists them.
        elements: Elements of the whole tensor.
        row: Elements of a row.
        depth: Position of the tensor among those of the optimizer, 0 to 1.
        lr: Learning rate of the measured step; damages are given for a rate of 1.
    """

    state: str
    formats: Sequence[str]
    present: int
    energies: Mapping[str, float]
    elements: int
    row: int
    depth: float
    lr: float = 1.0

    def mean(self, name: str) -> float:
        """Mean over the sample of what the energy `name` sums."""
        return _ratio(self.energies[name], self.energies["elements"])

    def damage(self) -> list[float]:
        """Sum of squared errors that each format makes in the step of the weight over `lr`, whole tensor."""
        scale = self.elements / (self.lr * self.lr)
        return [self.mean(f"{self.state}.{name}.damage") * scale for name in self.formats]

    def moved(self) -> float:
        """Sum of squared steps of the weight over `lr`, whole tensor."""
        return self.mean("move") * self.elements / (self.lr * self.lr)

    def of_format(self, position: int, name: str) -> float:
        """Energy of a format of this state; `position` in `formats`."""
        return self.energies[f"{self.state}.{self.formats[position]}.{name}"]


@dataclass(frozen=True, slots=True)
class Averages:
    """Moving averages over all tensors of a decision.

    Attributes:
        gradient_rms: Of the root mean square of the gradient.
        gradient_dispersion: Of the coefficient of variation of its magnitude.
    """

    gradient_rms: float = 0.0
    gradient_dispersion: float = 0.0

    def updated(self, states: Sequence[Measured], keep: float = 0.9) -> Averages:
        """Return the averages after one more decision; the first one counts in full."""
        if not states:
            return self
        weights = [state.elements for state in states]
        new = [_weighted([part(state) for state in states], weights) for part in (_rms, _dispersion)]
        old = (self.gradient_rms, self.gradient_dispersion)
        return Averages(*(n if o == 0.0 else keep * o + (1 - keep) * n for o, n in zip(old, new, strict=True)))


def factors(states: Sequence[Measured], averages: Averages) -> list[dict[str, float]]:
    """Return the factors of every state of a decision.

    Args:
        states: What was measured; totals run over these.
        averages: Moving averages, this decision included.

    Returns:
        For each state a value for each of `NAMES`; 0 where a ratio has no meaning.
    """
    energy = math.fsum(state.mean("grad") * state.elements for state in states)
    move = _ratio(math.fsum(state.moved() for state in states), float(sum(state.elements for state in states)))
    return [_factors(state, averages, energy, move) for state in states]


def _factors(state: Measured, averages: Averages, energy: float, move: float) -> dict[str, float]:
    value = state.energies[f"{state.state}.value"]
    error = state.of_format(state.present, "error")
    stored = state.of_format(state.present, "stored")
    elements = state.energies["elements"]
    below = max(state.present - 1, 0)
    return {
        "encode_error": _ratio(error, value),
        "encode_error_below": _ratio(state.of_format(below, "error"), value),
        "update_error": _ratio(state.of_format(state.present, "damage"), state.energies["move"]),
        "saturated": _ratio(state.of_format(state.present, "saturated"), elements),
        "crest": math.sqrt(_ratio(state.energies[f"{state.state}.peak"] * _blocks(state), value)),
        "kurtosis": state.mean(f"{state.state}.kurtosis"),
        "swamping": math.sqrt(_ratio(state.energies[f"{state.state}.change"], 12 * error)),
        "radial_bias": _ratio(stored - value - error, 2 * value),
        "signal_to_noise": _ratio(state.moved(), move * state.elements),
        "gradient_rms": _ratio(_rms(state), averages.gradient_rms),
        "gradient_dispersion": _ratio(_dispersion(state), averages.gradient_dispersion),
        "gradient_energy": _ratio(state.mean("grad") * state.elements, energy),
        "zeros": state.mean("grad.zeros"),
        "size": float(state.elements),
        "fan_in": float(state.row),
        "depth": state.depth,
    }


def _blocks(state: Measured) -> float:
    """Elements of a block, on average over the sample."""
    return _ratio(state.energies["elements"], state.energies["blocks"])


def _rms(state: Measured) -> float:
    return math.sqrt(state.mean("grad"))


def _dispersion(state: Measured) -> float:
    """Coefficient of variation of the gradient's magnitude."""
    mean = state.mean("grad.abs")
    return math.sqrt(max(0.0, _ratio(state.mean("grad") - mean * mean, mean * mean)))


def _weighted(values: Sequence[float], weights: Sequence[int]) -> float:
    return _ratio(math.fsum(v * w for v, w in zip(values, weights, strict=True)), float(sum(weights)))


def _ratio(above: float, below: float) -> float:
    return above / below if below > 0.0 else 0.0
