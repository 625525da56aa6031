"""Bytes of weights, residuals, gradients and states for one model and many optimizers.

There is no second formula: the real optimizers make their real states on the meta device, and
their ledgers are read. With FSDP2 the parts of the first rank, the fullest, replace them: the
formats follow from the whole parameter, the storages from the rank's rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stquant.codecs.blocks import Grid
from stquant.optim.adamw import AdamW
from stquant.planning.sources import Blueprint
from stquant.policy.policies import Policy
from stquant.report.ledger import Ledger, rows_of
from stquant.report.memory import held_bytes
from stquant.storage.master import PackedResidual
from stquant.storage.packed import PackedState


@dataclass(frozen=True, slots=True)
class Cost:
    """What one optimizer makes a rank hold, in bytes.

    Attributes:
        name: The optimizer and its policy.
        dtype: Dtype of the weights.
        weights: Parameters, frozen ones and buffers included.
        residual: Residuals of bf16 parameters.
        gradients: Gradients of the trained parameters, in their dtype.
        states: States and step counts.
        elements: Elements that the states describe.
        bits: True bits per state element, fp32 leftovers included, residuals apart.
        adaptable: Whether the policy is one of ours, so that it may be recommended.
    """

    name: str
    dtype: str
    weights: int
    residual: int
    gradients: int
    states: int
    elements: int
    bits: float
    adaptable: bool

    @property
    def total(self) -> int:
        """Bytes of all four."""
        return self.weights + self.residual + self.gradients + self.states


@dataclass(frozen=True, slots=True)
class Plan:
    """A model, and what it costs under several optimizers.

    Attributes:
        model: Its name.
        parameters: Elements of all parameters of the whole model.
        trained: Elements of those that are trained.
        ranks: FSDP2 ranks; bytes are those of the fullest rank.
        costs: One row for each optimizer.
        memory: Bytes that there are, or None.
    """

    model: str
    parameters: int
    trained: int
    ranks: int
    costs: Sequence[Cost]
    memory: int | None = None

    def fits(self, cost: Cost) -> bool | None:
        """Whether an optimizer fits into the memory; None if no memory was given."""
        return None if self.memory is None else cost.total <= self.memory

    @property
    def best(self) -> Cost | None:
        """The one of our policies with most bits that fits; None if none does or no memory was given."""
        fitting = [cost for cost in self.costs if cost.adaptable and self.fits(cost)]
        return max(fitting, key=lambda cost: cost.bits, default=None)

    @property
    def room(self) -> int | None:
        """Bytes that the memory has for states and residuals, as of `Budget(bytes=...)`; None if none was given."""
        if self.memory is None:
            return None
        ours = next(cost for cost in self.costs if cost.adaptable)
        return max(0, self.memory - ours.weights - ours.gradients)

    @property
    def bits_that_fit(self) -> float | None:
        """True bits per state element that the memory has room for, 0 to 32; None if none was given."""
        if self.memory is None:
            return None
        ours = next(cost for cost in self.costs if cost.adaptable)
        return min(32.0, max(0.0, 8 * (self.memory - ours.total + ours.states) / ours.elements))

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain numbers, strings, lists and dicts."""
        fields = ("name", "dtype", "weights", "residual", "gradients", "states", "total", "elements", "bits")
        rows = [{**{f: getattr(cost, f) for f in fields}, "fits": self.fits(cost)} for cost in self.costs]
        return {
            "model": self.model,
            "parameters": self.parameters,
            "trained": self.trained,
            "ranks": self.ranks,
            "memory": self.memory,
            "room": self.room,
            "bits_that_fit": self.bits_that_fit,
            "best": None if self.best is None else self.best.name,
            "rows": rows,
        }


def plan(
    model: Blueprint,
    ours: Mapping[str, Policy],
    *,
    recipes: Mapping[str, Policy] | None = None,
    dtype: torch.dtype | None = None,
    master_bits: int | str | None = "auto",
    ranks: int = 1,
    memory: int | None = None,
) -> Plan:
    """Return what a model costs with torch's AdamW, with recipes of others, and with our policies.

    Args:
        model: The model.
        ours: Policies by name; one of these is recommended.
        recipes: Policies to compare with.
        dtype: Dtype of the weights for all but the first row, which is fp32; None keeps the model's.
        master_bits: Bits of the residuals of bf16 parameters, for our optimizers.
        ranks: Ranks that FSDP2 shards the parameters over.
        memory: Bytes that a rank has.

    Raises:
        ValueError: The model has nothing to train, or a policy or `master_bits` does not fit it.
    """
    if not any(p.requires_grad for _, p in model.parameters):
        raise ValueError(f"{model.name} has no parameter to train")
    cast = model.to(dtype)
    costs = [_cost("torch AdamW", model.to(torch.float32), _torch_adamw, ranks)]
    if any(p.dtype is not torch.float32 for _, p in cast.parameters):
        costs.append(_cost("torch AdamW", cast, _torch_adamw, ranks))
    for policies, adaptable in ((recipes or {}, False), (ours, True)):
        for name, policy in policies.items():
            make = _packed_adamw(policy, master_bits)
            costs.append(_cost(f"STQuant {name}", cast, make, ranks, adaptable))
    sizes = [(p.numel(), p.requires_grad) for _, p in model.parameters]
    trained = sum(size for size, is_trained in sizes if is_trained)
    return Plan(model.name, sum(size for size, _ in sizes), trained, ranks, costs, memory)


Make = Callable[[Sequence[tuple[str, nn.Parameter]]], torch.optim.Optimizer]


def _torch_adamw(parameters: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW([param for _, param in parameters], foreach=False)
    for _, param in parameters:
        param.grad = torch.empty_like(param)
    optimizer.step()  # torch makes states nowhere else
    return optimizer


def _packed_adamw(policy: Policy, master_bits: int | str | None) -> Make:
    def make(parameters: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        optimizer = AdamW(parameters, policy=policy, master_bits=master_bits)
        optimizer.init_state()
        return optimizer

    return make


def _cost(name: str, model: Blueprint, make: Make, ranks: int, adaptable: bool = False) -> Cost:
    trained = [(key, param) for key, param in model.parameters if param.requires_grad]
    optimizer = make(trained)
    rows = [
        row for key, p in trained for row in rows_of(key, _part(p, ranks), _parts(optimizer.state[p], p, ranks), {})
    ]
    ledger = Ledger(rows)
    return Cost(
        name=name,
        dtype=", ".join(sorted({str(param.dtype).removeprefix("torch.") for _, param in trained})),
        weights=held_bytes(_part(p, ranks) for _, p in model.parameters) + held_bytes(model.buffers),
        residual=ledger.residual_bytes,
        gradients=held_bytes(_part(p, ranks) for _, p in trained),
        states=ledger.bytes - ledger.residual_bytes,
        elements=sum(row.elements for row in rows if row.state != "residual"),
        bits=ledger.bits,
        adaptable=adaptable,
    )


def _parts(state: Mapping[str, Any], param: Tensor, ranks: int) -> dict[str, Any]:
    """Return one parameter's state as the first of several ranks holds it; what is not per element is whole."""
    return {
        key: value if isinstance(value, Tensor) and value.shape != param.shape else _part(value, ranks)
        for key, value in state.items()
    }


def _part(value: Any, ranks: int) -> Any:
    """Return a rank's part of a parameter or a state; numbers and scalars are not cut."""
    if ranks == 1:
        return value
    if isinstance(value, PackedState):
        return PackedState.zeros(value.format, _rows(value.grid, ranks), "meta")
    if isinstance(value, PackedResidual):
        return PackedResidual.zeros(value.bits, _rows(value.grid, ranks), "meta")
    if isinstance(value, Tensor) and value.ndim:
        return torch.empty(_first_chunk(value.shape, ranks), dtype=value.dtype, device="meta")
    return value


def _rows(grid: Grid, ranks: int) -> Grid:
    return Grid(_first_chunk(grid.shape, ranks), grid.lead, grid.block)


def _first_chunk(shape: Sequence[int], ranks: int) -> tuple[int, ...]:
    """FSDP2 cuts dimension 0 as `torch.chunk` does: the first part is the largest."""
    return (-(-shape[0] // ranks), *shape[1:])
