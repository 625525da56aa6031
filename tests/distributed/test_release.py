"""Gradient release under FSDP2, HSDP and tensor parallel: the bits of the normal loop."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import stquant
from tests.distributed.layouts import full
from tests.distributed.ranks import Ranks


def make(layout: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 37))
    if layout == "tp":
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        return parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
    if layout == "fsdp x tp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        return fully_shard(model, mesh=mesh["dp"])
    if layout == "replicate":
        return replicate(model, mesh=init_device_mesh("cpu", (2,)))  # type: ignore[return-value]
    if layout == "offload":
        return fully_shard(model, offload_policy=CPUOffloadPolicy(pin_memory=False), mesh=init_device_mesh("cpu", (2,)))
    if layout == "hsdp":
        return fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards")))
    return fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def trained(layout: str, released: bool, micro_batches: int) -> list[torch.Tensor]:
    model = make(layout)
    optimizer = stquant.AdamW(model.named_parameters(), lr=1e-2, policy=stquant.Fixed(exp_avg=2, exp_avg_sq=1))
    if released:
        stquant.release_gradients(model, optimizer)
    data = {"tp": 0, "fsdp x tp": dist.get_rank() // 2}.get(layout, dist.get_rank())
    generator = torch.Generator().manual_seed(data)
    for _ in range(4):
        for number in range(micro_batches):
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(number == micro_batches - 1)
            model(torch.randn(8, 64, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [full(param.detach()) for param in model.parameters()]


def differing(layout: str, micro_batches: int) -> list[bool]:
    normal, released = trained(layout, False, micro_batches), trained(layout, True, micro_batches)
    return [torch.equal(a, b) for a, b in zip(normal, released, strict=True)]


CASES = [
    ("fsdp", 2, 1),
    ("fsdp", 3, 3),
    ("offload", 2, 2),
    ("hsdp", 4, 2),
    ("replicate", 2, 2),
    ("tp", 2, 1),
    ("fsdp x tp", 4, 2),
]


@pytest.mark.parametrize(("layout", "size", "micro_batches"), CASES)
def test_released_gradients_give_the_bits_of_the_normal_loop(
    ranks: Callable[[int], Ranks], layout: str, size: int, micro_batches: int
) -> None:
    assert ranks(size)(differing, layout, micro_batches) == [[True] * 4] * size
