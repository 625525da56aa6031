"""Who serves the operations, and why.

One table of backends. Unless one is asked for, tensors on a GPU go to the triton kernels and all
others to the compiled ones. A backend that was asked for and is missing raises; there is no silent
fallback: `explain` says what serves, and slow kernels where fast ones are missing warn once.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stquant.codecs.blocks import Box
from stquant.codecs.format import Format
from stquant.errors import BackendError
from stquant.kernels import cpu, reference, triton
from stquant.kernels.ops import AdamRule, Candidates, Item, LionRule, Packed, Rule, SGDRule
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
    measure: Callable[[Sequence[Item], Rule, Candidates], Tensor]
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
    reference.measure,
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
    cpu.measure,
    cpu.adam_step_,
    cpu.sgd_step_,
    cpu.lion_step_,
)

_NAMES = ("triton", "cpu", "reference")
"""The backends, the best ones first."""


_SERVES = {"triton": triton.SERVES, "cpu": CPU.serves, "reference": REFERENCE.serves}


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
    defaults = {name for name in ("triton", "cpu") if _why_not(name) is None and (name == "cpu" or triton.has_gpu())}
    if "cpu" not in defaults:
        defaults.add(REFERENCE.name)
    return [
        Explanation(name, _why_not(name) is None, name in defaults, _SERVES[name], _why_not(name) or _why(name))
        for name in _NAMES
    ]


def resolve(name: str | None) -> Operations:
    """Return the backend called `name`, or the best of this machine for each tensor if None.

    Raises:
        BackendError: There is no backend of that name, or it is not available on this machine.
    """
    if name is None:
        host = REFERENCE if cpu.REASON is not None else _usable("cpu")
        return _by_device(host) if triton.has_gpu() else host
    if name not in _NAMES:
        raise BackendError(f"backend={name!r} is unknown; use None or one of {sorted(_NAMES)}")
    return _usable(name)


def why_not_compiled(name: str | None, param: Tensor, formats: Sequence[Format], box: Box | None = None) -> str | None:
    """Say why no compiled kernel of a backend takes the steps of a parameter, or None if one does.

    Args:
        name: The backend; None is the best of this machine.
        param: The parameter.
        formats: Formats of its states.
        box: The part of it that this rank holds; None if that is all.
    """
    serving, reason = _serving(name, param)
    if serving == "triton":
        why: str | None = _triton_checks().why_not_served(param, formats, box)
        return why
    return reason or cpu.why_not_served(param, formats)


def why_not_captured(name: str | None, item: Item, rule: Rule) -> str | None:
    """Say why a CUDA graph cannot capture a parameter's part of a step, or None if it can.

    Args:
        name: The backend; None is the best of this machine.
        item: The parameter, with a counter.
        rule: The rule of the step.
    """
    serving, reason = _serving(name, item.param)
    if serving == "triton":
        why: str | None = _triton_checks().why_not_captured(item, rule)
        return why
    return reason or f"it is on {item.param.device}"


def _serving(name: str | None, param: Tensor) -> tuple[str, str | None]:
    """Name of the backend that serves a tensor, and why that is the reference if it is."""
    if name is None:
        name = "triton" if param.is_cuda else "cpu"
        reason = _why_not(name)
        return (name, None) if reason is None else (REFERENCE.name, reason)
    return name, f"backend={name!r} is plain torch" if name == REFERENCE.name else None


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
    return {"cpu": CPU, "reference": REFERENCE}.get(name) or _load_triton()


def _why_not(name: str) -> str | None:
    checks = {"cpu": cpu.why_not_available, "triton": triton.why_not_available}
    return checks[name]() if name in checks else None


def _why(name: str) -> str:
    if name == REFERENCE.name:
        return "part of the package"
    if name == "triton":
        return "runs in triton's interpreter, on CPU tensors" if triton.interpreted() else "compiled at first use"
    others = ", ".join(cpu.instruction_sets())
    return f"compiled; uses {cpu.instruction_set()} of {others} (STQUANT_CPU_ISA forces one)"


def _triton_checks() -> Any:
    from stquant.kernels.triton import serving

    return serving


@functools.lru_cache(maxsize=1)
def _load_triton() -> Operations:
    """Import what imports triton, which the package itself does without."""
    from stquant.kernels.triton import launch

    return Operations(
        "triton",
        f"{triton.SERVES}; hands the rest to the reference",
        launch.decode,
        launch.encode_,
        launch.recode_,
        launch.state_stats,
        reference.measure,
        launch.adam_step_,
        launch.sgd_step_,
        launch.lion_step_,
    )


@functools.lru_cache(maxsize=2)
def _by_device(host: Operations) -> Operations:
    """Operations that hand tensors on a GPU to triton and all others to `host`."""

    def of(tensor: Tensor) -> Operations:
        return _gpu() if tensor.is_cuda else host

    def step(name: str) -> Callable[[Sequence[Item], Any], None]:
        def step_(items: Sequence[Item], rule: Any) -> None:
            for on_gpu in (True, False):
                part = [item for item in items if item.param.is_cuda == on_gpu]
                if part:
                    getattr(of(part[0].param), name)(part, rule)

        return step_

    def measure(items: Sequence[Item], rule: Rule, candidates: Candidates) -> Tensor:
        found: dict[int, Tensor] = {}
        for on_gpu in (True, False):
            part = [position for position, item in enumerate(items) if item.param.is_cuda == on_gpu]
            if part:
                chosen = [items[position] for position in part]
                found |= zip(part, of(chosen[0].param).measure(chosen, rule, candidates), strict=True)
        return torch.stack([found[position] for position in range(len(items))])

    return Operations(
        "by device",
        "tensors on a GPU: triton; all others: " + host.name,
        lambda state, out: of(out).decode(state, out),
        lambda state, values: of(values).encode_(state, values),
        lambda source, target: of(source.codes).recode_(source, target),
        lambda state: of(state.codes).state_stats(state),
        measure,
        step("adam_step_"),
        step("sgd_step_"),
        step("lion_step_"),
    )


def _gpu() -> Operations:
    reason = _why_not("triton")
    if reason is None:
        return _load_triton()
    _warn_once(reason)
    return REFERENCE


@functools.lru_cache(maxsize=1)
def _warn_once(reason: str) -> None:
    warnings.warn(f"stquant runs on its slow reference kernels on the GPU: {reason}", RuntimeWarning, stacklevel=6)
