"""Clipping for gradients that are never all there at once: by a tensor's own norm, or the last step's global one."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


class TensorClip:
    """Scales each gradient down to a norm of its own.

    Args:
        limit: Largest L2 norm of one gradient.
    """

    def __init__(self, limit: float) -> None:
        self._limit = _checked("clip_tensor_norm", limit)

    def clip_(self, param: Tensor) -> None:
        """Clip one gradient in place, as `torch.nn.utils.clip_grad_norm_([param], limit)`."""
        torch.nn.utils.clip_grad_norm_([param], self._limit)

    def end_step(self) -> None:
        """All gradients of the step were seen."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing carries over to the next step."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up nothing."""


class PreviousNormClip:
    """Scales all gradients of a step by one factor, made from the global norm of the step before.

    The first step is not clipped, nor is one after a step whose norm was not finite. The factor is
    `limit / (norm + 1e-6)`, at most 1, as in `torch.nn.utils.clip_grad_norm_`; norms are fp32.

    Args:
        limit: Largest L2 norm of all gradients together.
    """

    def __init__(self, limit: float) -> None:
        self._limit = _checked("clip_previous_norm", limit)
        self._norms: list[Tensor] = []
        self.norm: Tensor | None = None
        """Global norm of the last step's gradients before clipping, 0-dim fp32."""

    def clip_(self, param: Tensor) -> None:
        """Note one gradient's norm, and scale it in place."""
        assert param.grad is not None
        norm: Any = torch.linalg.vector_norm(param.grad, dtype=torch.float32)
        self._norms.append(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        if self.norm is not None:
            torch.nn.utils.clip_grads_with_norm_([param], self._limit, self.norm)

    def end_step(self) -> None:
        """Make the norm that the next step is clipped by."""
        if self._norms:
            device = self._norms[0].device
            norm = torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in self._norms]))
            self.norm = torch.where(norm.isfinite(), norm, 0.0)
            self._norms.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the norm, which continuing bit for bit needs."""
        return {"norm": None if self.norm is None else float(self.norm)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up the norm of a run that stopped."""
        norm = state_dict["norm"]
        self.norm = None if norm is None else torch.tensor(norm, dtype=torch.float32)


def clipping(clip_tensor_norm: float | None, clip_previous_norm: float | None) -> TensorClip | PreviousNormClip | None:
    """Return the clipping that the arguments of `release_gradients` ask for.

    Raises:
        ValueError: Both are given, or one is not a positive number.
    """
    if clip_tensor_norm is not None and clip_previous_norm is not None:
        raise ValueError(
            f"clip_tensor_norm={clip_tensor_norm!r} and clip_previous_norm={clip_previous_norm!r} exclude each other; "
            "give one of them"
        )
    if clip_tensor_norm is not None:
        return TensorClip(clip_tensor_norm)
    return None if clip_previous_norm is None else PreviousNormClip(clip_previous_norm)


def _checked(name: str, limit: float) -> float:
    if not 0 < limit < math.inf:
        raise ValueError(f"{name}={limit!r} is out of range; allowed is a positive number, for example 1.0")
    return float(limit)
