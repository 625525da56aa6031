"""Problems that every backend must solve alike, and the comparison to the bit.

A problem is drawn once and copied for each side, buffers included; code and scale buffers start
out with 0xAA where nothing has been written, so that a forgotten element shows.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from stquant.codecs import catalog
from stquant.codecs.blocks import Grid
from stquant.kernels.ops import AdamRule, Item, State
from stquant.storage.master import PackedResidual
from stquant.storage.packed import PackedState

ADAMW = AdamRule(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1, decoupled=True, maximize=False, seed=7)
EXTREMES = (1e-44, -3e-39, 1e-30, -1e-20, 1e-12, 3e4, -1e15, 6e19, -3e38, 0.0, -0.0)
NON_FINITE = (float("inf"), float("-inf"), float("nan"))


@dataclass(frozen=True)
class Case:
    """One parameter of a step.

    `formats` gives each state a format's name, or "fp32" for a plain tensor. `residual` and
    `stochastic` say how a 16-bit parameter is rounded.
    """

    formats: Mapping[str, str]
    shape: tuple[int, ...] = (3, 257)
    dtype: torch.dtype = torch.float32
    grad_dtype: torch.dtype = torch.float32
    block: int = 128
    residual: int = 0
    stochastic: bool = False
    non_finite: bool = False

    def item(self, noise_id: int = 0) -> Item:
        """Return the item before its first step."""
        states: dict[str, State] = {}
        for name, format_name in self.formats.items():
            if format_name == "fp32":
                states[name] = torch.zeros(self.shape)
            else:
                format = catalog.get(format_name, self.block)
                states[name] = PackedState.zeros(format, Grid.of(self.shape, self.block))
        param = torch.randn(self.shape)
        flat = param.view(-1)
        if flat.numel() > 64:
            flat[:64:7] *= 1e-38
            flat[1:64:9] *= 1e30
        residual = PackedResidual.zeros(self.residual, Grid.of(self.shape, self.block)) if self.residual else None
        param = param.to(self.dtype)
        return Item(param, param, states, residual, self.stochastic, 0, noise_id)

    def gradients(self, steps: int) -> list[Tensor]:
        """Draw gradients: 30 % zeros, whole blocks of zeros, tiny, huge and perhaps non-finite values."""
        drawn = []
        for step in range(steps):
            grad = torch.randn(self.shape) * 10.0 ** (step % 5 - 3)
            grad[torch.rand(self.shape) < 0.3] = 0.0
            flat = grad.view(-1)
            if not flat.numel():
                drawn.append(grad.to(self.grad_dtype))
                continue
            special = EXTREMES + (NON_FINITE if self.non_finite and step % 3 == 1 else ())
            at = torch.randperm(flat.numel())[: max(1, flat.numel() // 40)]  # no place twice: the last write would win
            flat[at] = torch.tensor(special)[torch.randint(len(special), at.shape)]
            if flat.numel() > 512 and step % 2:
                flat[128:384] = 0.0
            drawn.append(grad.to(self.grad_dtype))
        return drawn


def run(step: object, cases: Sequence[Case], rule: AdamRule, steps: int = 10, seed: int = 0) -> list[Item]:
    """Take `steps` steps on fresh items of all cases in one call each, and return them."""
    torch.manual_seed(seed)
    items = [case.item(noise_id) for noise_id, case in enumerate(cases)]
    gradients = [case.gradients(steps) for case in cases]
    for number in range(steps):
        items = [
            replace(item, grad=grads[number], step=number + 1) for item, grads in zip(items, gradients, strict=True)
        ]
        before = copy.deepcopy([item.grad for item in items])
        step(items, rule)  # type: ignore[operator]
        for item, grad in zip(items, before, strict=True):
            assert bits(item.grad).equal(bits(grad)), "a gradient was modified"
    return items


def bits(tensor: Tensor) -> Tensor:
    """Return the bit patterns of a floating tensor, all NaN alike; other tensors as they are."""
    if not tensor.is_floating_point():
        return tensor
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return torch.where(tensor.isnan(), torch.full_like(tensor, float("nan")), tensor).contiguous().view(whole)


def tensors(item: Item) -> dict[str, Tensor]:
    """Return everything that a step changes, by name."""
    found = {"param": item.param}
    for name, state in item.states.items():
        if isinstance(state, Tensor):
            found[name] = state
        else:
            found |= {f"{name}.codes": state.codes, f"{name}.scales": state.scales}
    if item.residual is not None:
        found["residual"] = item.residual.codes
    return found


def assert_equal(ours: Sequence[Item], truth: Sequence[Item], cases: Sequence[Case]) -> None:
    """Assert that two sides agree to the bit in everything that a step changes."""
    for a, b, case in zip(ours, truth, cases, strict=True):
        expected = tensors(b)
        for name, value in tensors(a).items():
            same = torch.eq(bits(value), bits(expected[name]))
            assert bool(same.all()), (
                f"{name} differs in {int((~same).sum())} of {same.numel()} places, first at "
                f"{(~same).nonzero()[0].tolist()}: {value[~same][0]} instead of {expected[name][~same][0]}; {case}"
            )
