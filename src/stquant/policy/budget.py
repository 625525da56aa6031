"""Adaptive policies: formats that follow what is measured, under a limit.

A policy says which formats a state may have, when it is measured, and how many bytes or how much
damage is allowed. It knows nothing of parameters and states beyond a few numbers; `planner` makes
the plans, and the optimizer carries them out.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard

import torch

from stquant.codecs import catalog
from stquant.codecs.blocks import why_not_packed
from stquant.codecs.format import Format
from stquant.policy.facts import Choice, ParameterFacts

EVERY = 100
"""Steps between two decisions."""

WIDTHS = (0, 1, 2, 3, 4, 5, 6, 8)
"""Widths that a state can have."""

_EARLY = (10, 4, 2)
"""The first decisions fall a 10th, a 4th and half of `every` after the start."""

RUNGS = ((2, 0), (2, 2), (2, 4), (3, 4), (4, 4), (5, 4), (5, 5), (6, 5), (6, 6), (8, 6), (8, 8))
"""Widths of signed and non-negative states before anything was measured, from few to many bits."""

PRIOR = {
    True: {2: 0.21, 3: 0.069, 4: 0.012, 5: 0.0026, 6: 6.2e-4, 8: 3.7e-5},
    False: {0: 0.0097, 1: 0.046, 2: 0.055, 3: 0.02, 4: 0.0058, 5: 7.0e-4, 6: 1.7e-4, 8: 1.1e-5},
}
"""Error of the step of the weight, relative in mean squares, that signed and non-negative states of
each width make where gradients are independent normal noise. Stands in until something is measured."""

PREPAID = 1 / 16
"""Weight of the error of a format that prepays. What it rounds away reaches the weight at once instead
of over the next steps, so its errors shift the step in time and do not add up, as those of other
formats do. How much less it counts is a choice, not a fit."""

_SIZES = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


@dataclass(frozen=True, slots=True)
class Holdings:
    """What the parameters of one budget hold besides packed states, in bytes and elements.

    Attributes:
        parameters: Elements of the parameters.
        state_elements: Elements of the states, packed and plain.
        plain_bytes: Bytes of states that are not packed, step counts and measurements.
        residual_bytes: Bytes of residuals.
        compact_bytes: Bytes of the packed states in their smallest formats.
        packed_elements: Elements of the packed states.
    """

    parameters: int
    state_elements: int
    plain_bytes: int
    residual_bytes: int
    compact_bytes: int
    packed_elements: int


class AdaptivePolicy(Protocol):
    """What the controller asks of a policy beyond `Policy`."""

    every: int
    block: int
    tolerance: float | None
    """Relative mean square error allowed in the step of the weight; None if bytes are limited."""
    prepaid: float
    """Weight of the error of formats that prepay, relative to others."""

    def limit(self, holdings: Holdings) -> int | None:
        """Bytes allowed for packed states; None if the error is limited."""
        ...

    def counted(self, holdings: Holdings) -> int:
        """Bytes besides those of packed states that count against the limit a user gave."""
        ...

    def least(self, holdings: Holdings, packed: int) -> str:
        """The smallest limit for which `packed` bytes of packed states would do, as an argument."""
        ...

    def due(self, step: int) -> bool:
        """Whether a parameter is measured at its own `step`."""
        ...

    def choose(self, facts: ParameterFacts, states: Mapping[str, bool]) -> dict[str, Choice]:
        """The smallest formats, or fp32 for a parameter that cannot be packed."""
        ...

    def ladder(self, facts: ParameterFacts, signed: bool) -> tuple[Format, ...]:
        """Formats that a packed state may have, by growing width."""
        ...


class _Adapting:
    """What the adaptive policies share.

    Args:
        every: Steps between two decisions, at least 1; the first ones come earlier.
        block: Elements that share a scale: a power of two, at least 32.
        flat: Also pack 1-D parameters, as one row.
    """

    tolerance: float | None = None
    prepaid = PREPAID
    least_unsigned = 0
    """Fewest bits of non-negative states."""

    def __init__(self, every: int, block: int, flat: bool) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"every={every!r} is not a number of steps; use 1 or more, for example every={EVERY}")
        catalog.FLOAT32.with_block(block)
        self.every = every
        self.block = block
        self.flat = flat
        self._early = frozenset(every // part for part in _EARLY if every >= 2 * part)

    def check(self, states: Mapping[str, bool]) -> None:
        """Accept any states."""

    def due(self, step: int) -> bool:
        """Whether a parameter is measured at its own `step`: every so many steps, and early on."""
        return step % self.every == 0 or step in self._early

    def ladder(self, facts: ParameterFacts, signed: bool) -> tuple[Format, ...]:
        """Return the formats that a packed state may have, by growing width.

        Args:
            facts: The parameter.
            signed: Whether the state holds negative values.
        """
        least = (2 if facts.prepays else facts.plain_bits) if signed else self.least_unsigned
        return _ladder(least, signed, self.block)

    def choose(self, facts: ParameterFacts, states: Mapping[str, bool]) -> dict[str, Choice]:
        """Choose the smallest formats, or fp32 for a parameter that cannot be packed."""
        reason = "float64 parameter" if facts.dtype is torch.float64 else None
        reason = reason or why_not_packed(facts.shape, self.block, self.flat)
        if reason:
            return {name: Choice(catalog.FLOAT32, reason) for name in states}
        return {name: Choice(self.ladder(facts, signed)[0]) for name, signed in states.items()}

    def formats_of(self, states: Mapping[str, bool]) -> dict[str, Format]:
        """Return formats that are always open to a state where a parameter can be packed."""
        facts = ParameterFacts((), torch.float32, prepays=False)
        return {name: self.ladder(facts, signed)[0] for name, signed in states.items()}

    def limit(self, holdings: Holdings) -> int | None:
        """Bytes allowed for packed states; None if the error is limited."""
        raise NotImplementedError

    def counted(self, holdings: Holdings) -> int:
        """Bytes besides those of packed states that count against the limit a user gave."""
        return holdings.plain_bytes + holdings.residual_bytes

    def least(self, holdings: Holdings, packed: int) -> str:
        """Say which limit would do; policies without one need none."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """Return the arguments that make this policy again, and its kind."""
        return {"every": self.every, "block": self.block, "flat": self.flat}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self)) and self.to_dict() == other.to_dict()

    def __hash__(self) -> int:
        return hash(repr(self))

    def _repr(self, shown: str) -> str:
        options = {"every": EVERY, "block": 128, "flat": False}
        extra = [f"{name}={getattr(self, name)}" for name, usual in options.items() if getattr(self, name) != usual]
        return f"{type(self).__name__}({', '.join(filter(None, [shown, *extra]))})"


class Budget(_Adapting):
    """The formats that do the least damage within a number of bits or bytes, never exceeded.

    One of `bits`, `bytes` and `bytes_per_param` is given. The parameter groups of an optimizer
    that have the optimizer's policy share one budget; a group that was given its own has its own.

    Args:
        bits: Average true bits per state element, scales, padding, measurements and states that
            stay in fp32 included, residuals of bf16 parameters apart.
        bytes: Bytes of states and residuals together: a number, or text such as "6GiB".
        bytes_per_param: The same, for each element of the parameters.
        every: Steps between two decisions; the first ones come earlier.
        block: Elements that share a scale: a power of two, at least 32.
        flat: Also pack 1-D parameters, as one row.

    Raises:
        ValueError: Not exactly one limit was given, or one is not positive.
        FormatError: The block size is not available.
    """

    def __init__(
        self,
        bits: float | None = None,
        *,
        bytes: int | str | None = None,
        bytes_per_param: float | None = None,
        every: int = EVERY,
        block: int = 128,
        flat: bool = False,
    ) -> None:
        super().__init__(every, block, flat)
        limits = {"bits": bits, "bytes": bytes, "bytes_per_param": bytes_per_param}
        given = {name: value for name, value in limits.items() if value is not None}
        if len(given) != 1:
            raise ValueError(f"Budget was given {given or 'no limit'}; give one of bits, bytes and bytes_per_param")
        self._name, self._value = next(iter(given.items()))
        self._amount = _amount(self._name, self._value)

    def limit(self, holdings: Holdings) -> int:
        """Bytes allowed for packed states."""
        return self.total(holdings) - self.counted(holdings)

    def total(self, holdings: Holdings) -> int:
        """Bytes allowed for everything that counts."""
        return math.floor(self._amount * self._unit(holdings))

    def counted(self, holdings: Holdings) -> int:
        """Bytes that count besides packed states; residuals do not where bits are limited."""
        return holdings.plain_bytes + (0 if self._name == "bits" else holdings.residual_bytes)

    def least(self, holdings: Holdings, packed: int) -> str:
        """Return the smallest limit for which `packed` bytes of packed states would do."""
        needed = (packed + self.counted(holdings)) / self._unit(holdings)
        return f"{self._name}={math.ceil(needed) if self._name == 'bytes' else math.ceil(needed * 1000) / 1000}"

    def _unit(self, holdings: Holdings) -> float:
        """Bytes that one unit of the limit allows."""
        if self._name == "bytes":
            return 1.0
        return holdings.state_elements / 8 if self._name == "bits" else float(holdings.parameters)

    def to_dict(self) -> dict[str, Any]:
        """Return the arguments that make this policy again, and its kind."""
        return {"kind": "budget", self._name: self._value, **super().to_dict()}

    def __repr__(self) -> str:
        return self._repr(f"{self._name}={self._value!r}")


class Adaptive(_Adapting):
    """2 bits for each state, and a quarter bit more where it helps most.

    This is `policy="adaptive"`: on top of the smallest formats that kept up with fp32 AdamW at high
    learning rates, too (docs/results.md), a quarter of a bit for each packed element goes to the
    states whose rounding moves the weights most. Signed states whose format must not prepay start
    from more than 2 bits.

    Args:
        every: Steps between two decisions; the first ones come earlier.
        block: Elements that share a scale: a power of two, at least 32.
        flat: Also pack 1-D parameters, as one row.
    """

    BITS = 0.25
    least_unsigned = 2

    def __init__(self, *, every: int = EVERY, block: int = 128, flat: bool = False) -> None:
        super().__init__(every, block, flat)

    def limit(self, holdings: Holdings) -> int:
        """Bytes allowed for packed states."""
        return holdings.compact_bytes + math.floor(self.BITS * holdings.packed_elements / 8)

    def to_dict(self) -> dict[str, Any]:
        """Return the arguments that make this policy again, and its kind."""
        return {"kind": "adaptive", **super().to_dict()}

    def __repr__(self) -> str:
        return self._repr("")


class Tolerance(_Adapting):
    """The fewest bits that keep the predicted error of the update within a share of its size.

    The error of each single step counts, also where a format prepays and the next steps make up for it.

    Args:
        error: Mean square error of the step of the weights relative to its mean square, over all
            parameters that are packed: above 0 and below 1, for example 0.01.
        every: Steps between two decisions; the first ones come earlier.
        block: Elements that share a scale: a power of two, at least 32.
        flat: Also pack 1-D parameters, as one row.

    Raises:
        ValueError: `error` is out of range.
        FormatError: The block size is not available.
    """

    prepaid = 1.0

    def __init__(self, error: float, *, every: int = EVERY, block: int = 128, flat: bool = False) -> None:
        super().__init__(every, block, flat)
        if isinstance(error, bool) or not isinstance(error, int | float) or not 0.0 < error < 1.0:
            raise ValueError(f"error={error!r} is out of range; use a share above 0 and below 1, for example 0.01")
        self.tolerance = float(error)

    def limit(self, holdings: Holdings) -> None:
        """Bytes are not limited."""
        return

    def to_dict(self) -> dict[str, Any]:
        """Return the arguments that make this policy again, and its kind."""
        return {"kind": "tolerance", "error": self.tolerance, **super().to_dict()}

    def __repr__(self) -> str:
        return self._repr(repr(self.tolerance))


@functools.lru_cache(maxsize=64)
def _ladder(least: int, signed: bool, block: int) -> tuple[Format, ...]:
    widths = [bits for bits in PRIOR[signed] if bits >= least]
    return tuple(catalog.default_for(bits, signed).with_block(block) for bits in widths)


def is_adaptive(policy: object) -> TypeGuard[AdaptivePolicy]:
    """Whether a policy's formats follow what is measured."""
    return hasattr(policy, "ladder")


def rung(widths: tuple[int, int], ladder: Sequence[Format], signed: bool) -> int:
    """Return the position in a ladder of the widest format not above a rung's, or 0."""
    wanted = widths[0 if signed else 1]
    return max((position for position, format in enumerate(ladder) if format.bits <= wanted), default=0)


def _amount(name: str, value: Any) -> float:
    amount = value
    if name == "bytes" and isinstance(value, str):
        match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]+)\s*", value)
        if match is None or match[2] not in _SIZES:
            raise ValueError(f"bytes={value!r} cannot be read; use a number with one of {', '.join(_SIZES)}")
        amount = float(match[1]) * _SIZES[match[2]]
    if isinstance(amount, bool) or not isinstance(amount, int | float) or not 0 < amount < math.inf:
        raise ValueError(f"{name}={value!r} is not a positive number; use for example {_EXAMPLES[name]}")
    return float(amount)


_EXAMPLES = {"bits": "bits=2.0", "bytes": 'bytes="6GiB"', "bytes_per_param": "bytes_per_param=0.5"}
