"""One model in many layouts, and steps with the same gradients in all of them.

Everything here runs on every rank. Gradients are given, not computed, so the arithmetic of a
layout's forward and backward cannot matter and parameters and states must be equal to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import stquant

SIZES = {
    "single": 1,
    "ddp": 2,
    "replicate": 2,
    "fsdp 1": 1,
    "fsdp 2": 2,
    "fsdp 3": 3,
    "fsdp 4": 4,
    "fsdp offload": 2,
    "hsdp": 4,
    "tp": 2,
    "tp 4": 4,
    "fsdp x tp": 4,
}
"""Layouts, and the ranks that each takes."""

BLOCK = 64


class Model(nn.Module):
    """Shapes that divide by nothing, fewer rows than ranks, short blocks, a convolution, 1-D and 3-D."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(130, 256)
        self.down = nn.Linear(256, 37)
        self.few = nn.Parameter(torch.randn(3, 1500))
        self.experts = nn.Parameter(torch.randn(5, 7, 160))
        self.conv = nn.Conv2d(12, 13, 6)
        self.unused = nn.Parameter(torch.randn(65, 70))
        self.norm = nn.LayerNorm(131)

    def forward(self, x: Tensor) -> Tensor:
        """Never called: gradients are given."""
        raise NotImplementedError


def model_in(layout: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return the model, with the same weights on every rank and in every layout."""
    torch.manual_seed(0)
    model: nn.Module = Model().to(dtype)
    if layout == "single":
        return model
    if layout == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    world = dist.get_world_size()
    if layout == "replicate":
        return replicate(model, mesh=init_device_mesh("cpu", (world,)))  # type: ignore[return-value]
    if layout == "hsdp":
        return fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards")))
    if layout.startswith("fsdp x"):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        _tensor_parallel(model, mesh["tp"])
        return fully_shard(model, mesh=mesh["dp"])
    mesh = init_device_mesh("cpu", (world,))
    if layout.startswith("tp"):
        _tensor_parallel(model, mesh)
        return model
    if layout == "fsdp offload":
        return fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    return fully_shard(model, mesh=mesh)


def _tensor_parallel(model: nn.Module, mesh: Any) -> None:
    """Cut `up` by rows, `down` and the experts along their last dimension, copy the rest."""
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    for name, param in list(model.named_parameters(recurse=False)):
        placement = Shard(1) if name == "experts" else Replicate()
        setattr(model, name, nn.Parameter(distribute_tensor(param.detach(), mesh, [placement])))
    for module in (model.conv, model.norm):
        for name, param in list(module.named_parameters()):
            setattr(module, name, nn.Parameter(distribute_tensor(param.detach(), mesh, [Replicate()])))


def names_of(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Parameters by the names that the bare model has."""
    return [(name.removeprefix("module."), param) for name, param in model.named_parameters()]


def gradient(name: str, shape: Sequence[int], step: int) -> Tensor:
    """Return the gradient that a parameter gets at a step, with zeros and rows of other sizes."""
    generator = torch.Generator().manual_seed(1000 * step + sum(map(ord, name)))
    grad = torch.randn(tuple(shape), generator=generator)
    zero = torch.rand(tuple(shape), generator=generator) < 0.2
    return torch.where(zero, 0.0, grad * 10.0 ** (step % 4 - 2))


def take_steps(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    """Take the steps `first` to `last` - 1; `unused` never has a gradient, `norm.bias` every other step."""
    for step in range(first, last):
        for name, param in names_of(model):
            param.grad = None
            if name == "unused" or (name == "norm.bias" and step % 2) or not param.requires_grad:
                continue
            grad = gradient(name, param.shape, step).to(param.dtype)
            if isinstance(param, DTensor):
                grad = distribute_tensor(grad, param.device_mesh, _plain(param), src_data_rank=None)
                grad = grad.redistribute(placements=param.placements)
            param.grad = grad
        optimizer.step()


def _plain(param: DTensor) -> list[Any]:
    return [Replicate()] * param.device_mesh.ndim


def full(value: Any) -> Any:
    """Return a tensor whole, whatever its layout."""
    if isinstance(value, DTensor):
        return value.full_tensor()
    return value.detach().clone() if isinstance(value, Tensor) else value


def contents(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return policies, weights and presented states by name, whole, as comparable tensors and numbers."""
    found: dict[str, Any] = {"groups": [group["stquant"] for group in optimizer.param_groups]}
    states = optimizer.state_dict()["state"]
    for index, (name, param) in enumerate(names_of(model)):
        found[name] = full(param.detach())
        for key, value in states.get(index, {}).items():
            for part, inner in value.items() if isinstance(value, dict) else [("", value)]:
                found[f"{name}/{key}/{part}"] = full(inner)
    return found


def differences(ours: dict[str, Any], truth: dict[str, Any]) -> list[str]:
    """Return what is not equal to the bit."""
    if ours.keys() != truth.keys():
        return sorted(ours.keys() ^ truth.keys())
    wrong = []
    for key, value in truth.items():
        other = ours[key]
        if isinstance(value, Tensor):
            same = value.dtype is other.dtype and torch.equal(value, other)
        else:
            same = type(value) is type(other) and value == other
        if not same:
            wrong.append(f"{key}: {other} instead of {value}")
    return wrong


OPTIMIZERS: dict[str, tuple[Any, torch.dtype, dict[str, Any]]] = {
    "adamw": (stquant.AdamW, torch.float32, {"policy": stquant.Fixed(exp_avg=2, exp_avg_sq=1, block=BLOCK)}),
    "adamw 3+5": (stquant.AdamW, torch.float32, {"policy": stquant.Fixed(exp_avg=3, exp_avg_sq=5, block=32)}),
    "residual": (
        *(stquant.AdamW, torch.bfloat16),
        {"policy": stquant.Fixed(exp_avg=4, exp_avg_sq=2, block=BLOCK), "master_bits": 8},
    ),
    "bfloat16": (
        *(stquant.AdamW, torch.bfloat16),
        {"policy": stquant.Fixed(exp_avg=2, exp_avg_sq=1, block=BLOCK), "master_bits": 0},
    ),
    "float16": (stquant.AdamW, torch.float16, {"policy": "fp32"}),
    "recipe": (stquant.AdamW, torch.float32, {"policy": "flash8"}),
    "reference": (
        *(stquant.AdamW, torch.bfloat16),
        {"policy": stquant.Fixed(exp_avg=2, exp_avg_sq=1, block=BLOCK), "backend": "reference"},
    ),
    "adaptive": (stquant.AdamW, torch.bfloat16, {"policy": stquant.Budget(bits=3.0, block=BLOCK, every=2)}),
    "adam": (stquant.Adam, torch.float32, {"policy": stquant.Tolerance(0.05, block=BLOCK, every=2)}),
    "sgd": (
        *(stquant.SGD, torch.float32),
        {"momentum": 0.9, "nesterov": True, "policy": stquant.Fixed(2, block=BLOCK)},
    ),
    "lion": (stquant.Lion, torch.float32, {"policy": stquant.Fixed(4, block=BLOCK)}),
}
"""Optimizers by name: class, dtype of the model, options."""


def build(layout: str, which: str, **changes: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model in a layout and its optimizer."""
    cls, dtype, options = OPTIMIZERS[which]
    model = model_in(layout, dtype)
    return model, cls(names_of(model), lr=1e-2, weight_decay=0.1, **{**options, **changes})


def trained(layout: str, which: str, steps: int) -> dict[str, Any]:
    """Train in a layout and return everything."""
    model, optimizer = build(layout, which)
    take_steps(model, optimizer, 0, steps)
    return contents(model, optimizer)
