"""The contract of the kernels: what an operation is given.

A backend is a set of plain functions of the signatures below; `backend.Operations` lists them.
In-place operations end in an underscore.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from stquant.codecs.blocks import Box, Grid
from stquant.codecs.format import Format, Octaves


class Packed(Protocol):
    """A packed state as kernels see it."""

    format: Format
    grid: Grid
    octaves: Octaves
    codes: Tensor
    """uint8 `[rows, packed_bytes(row, bits)]`."""
    scales: Tensor
    """`[rows, blocks_per_row, *format.scale_parts]` of `format.scale_dtype`: means of LOG, largest
    magnitudes of the others."""


class PackedResidual(Protocol):
    """The residual of a bf16 parameter as kernels see it."""

    bits: int
    grid: Grid
    codes: Tensor
    """uint8 `[rows, packed_bytes(row, bits)]`, two's complement."""


State = Tensor | Packed
"""A state is a plain tensor of the parameter's shape, or packed."""


@dataclass(slots=True, eq=False)
class Memo:
    """What a backend knows of one parameter from its last step: `known`, as long as the `facts` are the same."""

    facts: object = None
    known: Any = None


@dataclass(slots=True, eq=False)
class Item:
    """One parameter's share of a step. Not frozen, which would double the time to make one.

    Attributes:
        param: The parameter's data, updated in place: fp64, fp32, bf16 or fp16, any strides.
        grad: Its gradient, never modified; any floating dtype, any strides.
        states: The states by name, updated in place. Plain ones have the compute dtype: fp64 for
            fp64 parameters, fp32 for all others.
        residual: Residual of a bf16 parameter, or None.
        stochastic: Whether a 16-bit parameter is rounded stochastically; without it to nearest.
        step: The parameter's own step count, this step included: 1 or more.
        noise_id: The parameter's number in the random key.
        box: Where `param` lies in the whole parameter; None if it is that.
        memo: Where the backend may keep what it knows of the parameter; None forgets it.
        counter: Takes the place of `step` in a step that a CUDA graph may capture: the count as a
            0-dim fp32 tensor on the device, which kernels read when they run.
    """

    param: Tensor
    grad: Tensor
    states: Mapping[str, State]
    residual: PackedResidual | None
    stochastic: bool
    step: int
    noise_id: int
    box: Box | None = None
    memo: Memo | None = None
    counter: Tensor | None = None

    @property
    def grid(self) -> Grid:
        """The grid of the states, or what serves for one if none is packed."""
        for state in self.states.values():
            if not isinstance(state, Tensor):
                return state.grid
        if self.residual is not None:
            return self.residual.grid
        if self.box is None or not self.stochastic:
            return Grid((self.param.numel(),), 0, 128)
        return Grid.of(self.box.whole, 128, self.box)


@dataclass(frozen=True, slots=True)
class AdamRule:
    """Hyperparameters of one AdamW or Adam step, shared by the items of a call.

    Attributes:
        lr: Learning rate.
        betas: Decay rates of `exp_avg` and `exp_avg_sq`.
        eps: Added to the denominator.
        weight_decay: Decay of the weights.
        decoupled: Decay the weights themselves (AdamW) instead of the gradient (Adam).
        maximize: Ascend instead of descend.
        seed: Seed of stochastic rounding.
        rate: Takes the place of `lr` in a step that a CUDA graph may capture: a one-element tensor.
    """

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    decoupled: bool
    maximize: bool
    seed: int
    rate: Tensor | None = None


@dataclass(frozen=True, slots=True)
class SGDRule:
    """Hyperparameters of one SGD step, shared by the items of a call.

    Attributes:
        lr: Learning rate.
        momentum: Decay rate of `momentum_buffer`; 0 has no such state.
        dampening: Share of the gradient that does not enter the momentum.
        weight_decay: Decay of the weights, added to the gradient.
        nesterov: Look one step ahead along the momentum.
        maximize: Ascend instead of descend.
        seed: Seed of stochastic rounding.
    """

    lr: float
    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool
    maximize: bool
    seed: int


@dataclass(frozen=True, slots=True)
class LionRule:
    """Hyperparameters of one Lion step, shared by the items of a call.

    Attributes:
        lr: Learning rate.
        betas: Weight of `exp_avg` in the update, and its decay rate.
        weight_decay: Decay of the weights themselves.
        maximize: Ascend instead of descend.
        seed: Seed of stochastic rounding.
        rate: Takes the place of `lr` in a step that a CUDA graph may capture: a one-element tensor.
    """

    lr: float
    betas: tuple[float, float]
    weight_decay: float
    maximize: bool
    seed: int
    rate: Tensor | None = None


Rule = AdamRule | SGDRule | LionRule

Candidates = Mapping[str, Sequence[Format]]
"""The formats that each state could have, at their default octaves."""
