"""Gradient release: a parameter steps during backward, and its gradient is freed at once.

A hook on every parameter runs when its gradient is complete and updates this one parameter, with
the same call and so the same bits as `step()`. `step()` is still called after each backward: it
ends the step and updates what no hook has seen. Between the two a `ConsumedGradient` stands in
`param.grad` and refuses to be read, so that code that counts on gradients fails instead of seeing
none.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from stquant.checkpoint.restore import Named, named
from stquant.checkpoint.schema import GROUP_KEY
from stquant.optim.base import PackedOptimizer
from stquant.optim.clipping import PreviousNormClip, TensorClip, clipping
from stquant.optim.consumed import ConsumedGradient, explain_second, is_consumed
from stquant.optim.options import check_gradient

_REDUCES_LATER = {
    "DistributedDataParallel": "averages gradients after the hooks of parameters have run, so replicas would diverge",
    "FullyShardedDataParallel": "reduces the gradients of its flat parameters after their hooks have run",
}


def release_gradients(
    model: nn.Module,
    optimizer: PackedOptimizer,
    *,
    clip_tensor_norm: float | None = None,
    clip_previous_norm: float | None = None,
) -> GradientRelease:
    """Let every parameter step during backward and free its gradient at once.

    Call `optimizer.step()` after each backward as before, and set learning rates before it. The
    result is bit for bit that of the normal loop. Gradient accumulation:

        release = stquant.release_gradients(model, optimizer)
        with release.accumulate():
            loss_of_first_micro_batches.backward()
        loss_of_last_micro_batch.backward()
        optimizer.step()

    Clipping by the global norm of the same step is impossible, as the first parameter steps
    before the last gradient exists. Two others are offered; a gradient is scaled in place.

    Args:
        model: The model whose parameters `optimizer` trains.
        optimizer: One of this library's optimizers.
        clip_tensor_norm: Largest L2 norm of each gradient by itself; None does not clip.
        clip_previous_norm: Largest L2 norm of all gradients together, judged by the step before;
            the first step is not clipped. Save `release.state_dict()` to continue bit for bit.

    Returns:
        The handle of the release: `accumulate()`, `remove()`; as a context manager it removes
        itself at the end.

    Raises:
        TypeError: `optimizer` is none of this library's.
        ValueError: A parameter is not one of the model, a module of it reduces gradients after
            the hooks (classic DDP, FSDP1), or a limit is not positive.
        RuntimeError: The optimizer is released already.
    """
    if not isinstance(optimizer, PackedOptimizer):
        raise TypeError(f"optimizer is {type(optimizer).__name__}; allowed are stquant's, for example stquant.AdamW")
    if optimizer._finish_backward is not None:
        raise RuntimeError("the gradients of this optimizer are released already; remove() that release first")
    clip = clipping(clip_tensor_norm, clip_previous_norm)
    for path, module in model.named_modules():
        _refuse_late_reduction(path, module)
    own = set(model.parameters())
    for entry in named(optimizer.param_groups):
        if entry.param not in own:
            raise ValueError(
                f"parameter {entry.name!r} of the optimizer is not one of the model; pass the model that it trains, "
                "or nn.ModuleList([a, b]) if these are several"
            )
    return GradientRelease(model, optimizer, clip)


class GradientRelease:
    """The handle that `release_gradients` returns."""

    def __init__(
        self, model: nn.Module, optimizer: PackedOptimizer, clip: TensorClip | PreviousNormClip | None
    ) -> None:
        self._optimizer = optimizer
        self._clip = clip
        self._hooks: dict[Tensor, RemovableHandle] = {}
        self._entries: dict[Tensor, Named] = {}
        self._options: list[dict[str, Any]] = []
        self._stepped: set[Tensor] = set()
        self._accumulating = False
        self._lock = threading.RLock()  # autograd runs one thread for each device
        optimizer._finish_backward = self._finish
        self._forward_hook = model.register_forward_pre_hook(_Guard(self))
        self._attach()

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Keep the gradients of backwards that run inside, for a later one to add to.

        Raises:
            RuntimeError: Parameters have stepped already and `step()` was not called since.
        """
        if self._stepped:
            raise RuntimeError("accumulate() after a backward that stepped; call optimizer.step() first")
        outer, self._accumulating = self._accumulating, True
        try:
            yield
        finally:
            self._accumulating = outer

    @property
    def norm(self) -> Tensor | None:
        """Global norm of the last step's gradients, 0-dim fp32; only `clip_previous_norm` measures it."""
        return self._clip.norm if isinstance(self._clip, PreviousNormClip) else None

    def remove(self) -> None:
        """End the release: gradients stay until `step()` again."""
        for handle in (*self._hooks.values(), self._forward_hook):
            handle.remove()
        self._hooks.clear()
        self._clear()
        self._optimizer._finish_backward = None

    def state_dict(self) -> dict[str, Any]:
        """Return what the next step needs of this one: the norm of `clip_previous_norm`, else nothing."""
        return self._clip.state_dict() if self._clip else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict()` returned."""
        if self._clip:
            self._clip.load_state_dict(state_dict)

    def __enter__(self) -> GradientRelease:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()

    def _attach(self) -> None:
        """Hook the parameters that are trained now: groups grow, wrappers replace, users freeze."""
        current = {e.param for e in named(self._optimizer.param_groups) if e.param.requires_grad and e.param.is_leaf}
        for param in self._hooks.keys() - current:
            self._hooks.pop(param).remove()
        for param in current - self._hooks.keys():
            register: Any = param.register_post_accumulate_grad_hook
            self._hooks[param] = register(self._consume)

    def _before_forward(self) -> None:
        if torch.compiler.is_compiling():
            return
        if active := getattr(nn.parallel.DistributedDataParallel, "_active_ddp_module", None):
            _refuse_late_reduction("around the model", active)
        if any(_is_half_autocast(kind) for kind in {param.device.type for param in self._hooks}):
            raise RuntimeError(
                "autocast to float16 needs a GradScaler, which judges a step by all of its gradients; with gradient "
                "release these are gone by then: use bfloat16, or train without release"
            )
        self._attach()

    @torch.no_grad()
    def _consume(self, param: Tensor) -> None:
        """Update one parameter with its complete gradient, and free that."""
        if self._accumulating:
            return
        with self._lock:
            if not self._stepped:
                self._begin()
            entry = self._entries.get(param)
            if entry is None:
                return  # it has left the optimizer
            if param in self._stepped:
                raise RuntimeError(explain_second(entry.name))
            check_gradient(entry)
            assert param.grad is not None
            if self._clip:
                self._clip.clip_(param)
            self._optimizer._update([entry])
            # A node of this backward that still needs the old weight raises instead of using the new one.
            torch.autograd.graph.increment_version(param)
            self._stepped.add(param)
            param.grad = ConsumedGradient.of(param.grad, entry.name)

    def _begin(self) -> None:
        self._optimizer.init_state()
        self._entries = {entry.param: entry for entry in named(self._optimizer.param_groups)}
        self._options = self._read_options()

    def _finish(self) -> None:
        """End the backward; `step` then updates the gradients that are left."""
        left = [e for e in named(self._optimizer.param_groups) if e.param.grad is not None and not is_consumed(e.param)]
        for entry in left:
            if entry.param in self._stepped:
                raise RuntimeError(explain_second(entry.name))
        if self._stepped and self._read_options() != self._options:
            raise RuntimeError(
                "an option of a parameter group changed between backward and step(), but parameters have stepped "
                "already; set learning rates and the like before backward"
            )
        self._clear()
        if self._clip:
            for entry in left:
                self._clip.clip_(entry.param)
            self._clip.end_step()
        self._attach()

    def _clear(self) -> None:
        for param in self._stepped:
            if is_consumed(param):
                param.grad = None
        self._stepped.clear()
        self._entries = {}

    def _read_options(self) -> list[dict[str, Any]]:
        """Hyperparameters as plain values; a learning rate may be a tensor that is changed in place."""
        return [
            {key: _plain(value) for key, value in group.items() if key not in ("params", GROUP_KEY)}
            for group in self._optimizer.param_groups
        ]


class _Guard:
    """The hook before the model's forward; a copy of the model, or a pickled one, is not released."""

    def __init__(self, release: GradientRelease | None = None) -> None:
        self._release = release

    def __call__(self, model: nn.Module, inputs: Any) -> None:
        if self._release is not None:
            self._release._before_forward()

    def __reduce__(self) -> tuple[type[_Guard], tuple[()]]:
        return _Guard, ()


def _is_half_autocast(kind: str) -> bool:
    return torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) is torch.float16


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor) else value


def _refuse_late_reduction(path: str, module: nn.Module) -> None:
    for kind in type(module).__mro__:
        if kind.__name__ in _REDUCES_LATER:
            raise ValueError(
                f"{path or 'the model'} is {kind.__name__}, which {_REDUCES_LATER[kind.__name__]}; use "
                "torch.distributed.fsdp.fully_shard, or train without gradient release"
            )
