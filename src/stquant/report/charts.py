"""What a chart needs besides paper: scales with readable ticks, and fewer points."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

POINTS = 400
"""Points that a line has at most."""

_TICKS = 5


@dataclass(frozen=True, slots=True)
class Scale:
    """From values to percent of the picture; `scale(value)` is 0 at `low` and 100 at `high`.

    Attributes:
        low: Smallest value, above 0 if `log`.
        high: Largest value, above `low`.
        log: Whether equal ratios are equally far apart.
    """

    low: float
    high: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Return the place of a value in percent."""
        low, high, value = (math.log(v) if self.log else v for v in (self.low, self.high, value))
        return 100 * (value - low) / (high - low)

    def ticks(self) -> list[float]:
        """Return a few round values between `low` and `high`."""
        return _log_ticks(self.low, self.high) if self.log else _linear_ticks(self.low, self.high)


def linear(low: float, high: float) -> Scale:
    """Return a scale of equal differences."""
    return Scale(low, high) if high > low else Scale(low - 0.5, low + 0.5)


def logarithmic(low: float, high: float) -> Scale:
    """Return a scale of equal ratios with a little room at both ends."""
    return Scale(low / 1.3, high * 1.3, log=True)


def downsampled(points: Sequence[tuple[int, float]]) -> tuple[list[tuple[float, float]], int]:
    """Return means of as many neighbouring points as leave at most `POINTS`, and that number."""
    each = math.ceil(len(points) / POINTS) or 1
    parts = [points[start : start + each] for start in range(0, len(points), each)]
    return [(part[-1][0], math.fsum(value for _, value in part) / len(part)) for part in parts], each


def _linear_ticks(low: float, high: float) -> list[float]:
    step = 10 ** math.floor(math.log10((high - low) / _TICKS))
    step *= next(factor for factor in (1, 2, 5, 10) if (high - low) / (factor * step) <= _TICKS)
    return [n * step for n in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1,), (1, 3), (1, 2, 5), tuple(range(1, 10))):
        found = [factor * 10.0**decade for decade in decades for factor in factors]
        found = [value for value in found if low <= value <= high]
        if len(found) >= 3:
            return found[:: math.ceil(len(found) / (2 * _TICKS))]
    return found
