"""Who serves the operations, and why.

One table of backends. A backend that was asked for and is missing raises; there is no silent
fallback: `explain` says what serves, and an optimizer that is made without the compiled kernels
warns once.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from stquant.codecs.format import Format
from stquant.errors import BackendError
from stquant.kernels import cpu, reference
from stquant.kernels.ops import AdamRule, Item, LionRule, Packed, SGDRule
from stquant.kernels.reference.stats import StateStats


@dataclass(frozen=True, slots=True)
class Operations:
    """The functions of one backend; `reference` documents each."""

    name: str
    serves: str
    decode: Callable[[Packed, Tensor], Tensor]
    encode_: Callable[[Packed, Tensor], None]
    recode_: Callable[[Packed, Packed], None]
    state_stats: Callable[[Packed], StateStats]
    adam_step_: Callable[[Sequence[Item], AdamRule], None]
    sgd_step_: Callable[[Sequence[Item], SGDRule], None]
    lion_step_: Callable[[Sequence[Item], LionRule], None]


REFERENCE = Operations(
    "reference",
    "everything, on every device, slowly: plain torch",
    reference.decode,
    reference.encode_,
    reference.recode_,
    reference.state_stats,
    reference.adam_step_,
    reference.sgd_step_,
    reference.lion_step_,
)

CPU = Operations(
    "cpu",
    f"{cpu.SERVES}; hands the rest to the reference",
    cpu.decode,
    cpu.encode_,
    cpu.recode_,
    cpu.state_stats,
    cpu.adam_step_,
    cpu.sgd_step_,
    cpu.lion_step_,
)

_BACKENDS = {backend.name: backend for backend in (CPU, REFERENCE)}
"""The backends, the best one first."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """What one backend is on this machine.

    Attributes:
        name: Name of the backend.
        available: Whether it can be used.
        default: Whether it serves when no backend is asked for.
        serves: What it takes.
        why: Why it is available or not, and how.
    """

    name: str
    available: bool
    default: bool
    serves: str
    why: str


def explain() -> list[Explanation]:
    """Return what each backend serves on this machine and why, the best one first."""
    default = resolve(None).name if _why_not("cpu") is None else REFERENCE.name
    return [
        Explanation(name, _why_not(name) is None, name == default, backend.serves, _why_not(name) or _why(name))
        for name, backend in _BACKENDS.items()
    ]


def resolve(name: str | None) -> Operations:
    """Return the backend called `name`, or the best of this machine if None.

    Raises:
        BackendError: There is no backend of that name, or it is not available on this machine.
    """
    if name is None:
        return REFERENCE if cpu.REASON is not None else _usable("cpu")
    if name not in _BACKENDS:
        raise BackendError(f"backend={name!r} is unknown; use None or one of {sorted(_BACKENDS)}")
    return _usable(name)


def why_not_compiled(name: str | None, param: Tensor, formats: Sequence[Format]) -> str | None:
    """Say why no compiled kernel of a backend takes the steps of a parameter, or None if one does.

    Args:
        name: The backend; None is the best of this machine.
        param: The parameter.
        formats: Formats of its states.
    """
    if resolve(name) is REFERENCE:
        return cpu.REASON or f"backend={name!r} is plain torch"
    return cpu.why_not_served(param, formats)


def warn_if_slow(name: str | None) -> None:
    """Warn, once per process, that the reference serves because the compiled kernels are missing."""
    global _warned
    if name is None and cpu.REASON is not None and not _warned:
        _warned = True
        warnings.warn(f"stquant runs on its slow reference kernels: {cpu.REASON}", RuntimeWarning, stacklevel=4)


_warned = False


def _usable(name: str) -> Operations:
    reason = _why_not(name)
    if reason is not None:
        raise BackendError(f"backend={name!r} is not available: {reason}")
    return _BACKENDS[name]


def _why_not(name: str) -> str | None:
    return cpu.why_not_available() if name == CPU.name else None


def _why(name: str) -> str:
    if name == REFERENCE.name:
        return "part of the package"
    others = ", ".join(cpu.instruction_sets())
    return f"compiled; uses {cpu.instruction_set()} of {others} (STQUANT_CPU_ISA forces one)"
