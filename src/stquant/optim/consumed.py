"""What stands in `param.grad` after gradient release has used the gradient: nothing, and it says so."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


class ConsumedGradient(Tensor):
    """Stands in `param.grad` from a parameter's update until `step()`; has no memory, and no value.

    Shape, dtype and device can be read; everything else raises `RuntimeError` with the reason.
    """

    _parameter: str
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def of(cls, grad: Tensor, name: str) -> ConsumedGradient:
        """Return what may stand in place of a gradient; `name` is the parameter's, for errors."""
        empty: ConsumedGradient = Tensor._make_wrapper_subclass(
            cls, grad.shape, strides=grad.stride(), dtype=grad.dtype, device=grad.device
        )
        empty._parameter = name
        return empty

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        name = next(_names(args), "")
        operation = func.__name__
        if operation.startswith("add"):
            raise RuntimeError(explain_second(name))
        if operation.startswith("_amp"):
            raise RuntimeError(
                f"GradScaler finds no gradient of parameter {name!r}: with gradient release it was used, still scaled, "
                "during backward; use bfloat16 without a scaler, or train without release"
            )
        raise RuntimeError(
            f"{operation} needs the gradient of parameter {name!r}, which gradient release has used and freed during "
            "backward; clip with release_gradients(clip_tensor_norm=...) or (clip_previous_norm=...), and read "
            "gradients in Tensor.register_hook"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ConsumedGradient({self._parameter!r}, shape={tuple(self.shape)}, dtype={self.dtype})"


def is_consumed(param: Tensor) -> bool:
    """Whether the parameter has stepped, and `step()` was not called since."""
    return isinstance(param.grad, ConsumedGradient)


def explain_second(name: str) -> str:
    """Return the reason to raise with when a gradient arrives for a parameter that has stepped."""
    return (
        f"a second gradient arrived for parameter {name!r}, which has stepped already. Call optimizer.step() after "
        "each backward; run all but the last backward of a step inside release.accumulate(); and checkpoint with "
        "use_reentrant=False, since reentrant checkpointing delivers a gradient in several parts"
    )


def _names(args: Any) -> Iterator[str]:
    for arg in args if isinstance(args, list | tuple) else (args,):
        if isinstance(arg, ConsumedGradient):
            yield arg._parameter
        elif isinstance(arg, list | tuple):
            yield from _names(arg)
