"""What wrappers do to parameters, gradients and masters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

import stquant
from tests.distributed.layouts import build, full, take_steps
from tests.distributed.ranks import Ranks


def gradients_still_to_be_summed() -> bool:
    mesh = init_device_mesh("cpu", (2,))
    param = nn.Parameter(distribute_tensor(torch.ones(64, 128), mesh, [Replicate()]))
    plain = nn.Parameter(torch.ones(64, 128))
    torch.manual_seed(dist.get_rank())
    part = torch.randint(-8, 8, (64, 128)).float()
    param.grad = DTensor.from_local(part, mesh, [Partial()])
    plain.grad = param.grad.full_tensor()
    for p in (param, plain):
        stquant.AdamW([p], lr=0.1).step()
    assert isinstance(param, DTensor)
    return torch.equal(param.to_local(), plain)


def test_a_gradient_in_another_layout_is_brought_to_the_parameters(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2)(gradients_still_to_be_summed) == [True, True]


def zero_redundancy(resume: bool) -> tuple[list[torch.Tensor], Any]:
    """Train under ZeRO, perhaps saving and loading in between; stochastic rounding, residuals."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns of torch.jit when imported

    model, _ = build("single", "residual")
    options = {"policy": stquant.Fixed(exp_avg=2, exp_avg_sq=1), "lr": 1e-2}
    zero = ZeroRedundancyOptimizer(model.parameters(), stquant.AdamW, **options)
    take_steps(model, zero, 0, 3)
    if resume:
        zero.consolidate_state_dict(to=0)
        saved = [zero.state_dict() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(saved, src=0)
        zero = ZeroRedundancyOptimizer(model.parameters(), stquant.AdamW, **options)
        zero.load_state_dict(saved[0])
    take_steps(model, zero, 3, 6)
    mine = {id(p) for group in zero.optim.param_groups for p in group["params"]}
    states = zero.optim.state_dict()["state"]
    assert states
    return [p.detach().clone() for p in model.parameters()], (len(mine), states)


@pytest.mark.filterwarnings("ignore")
def test_zero_redundancy_optimizer(ranks: Callable[[int], Ranks]) -> None:
    straight, resumed = ranks(2)(zero_redundancy, False), ranks(2)(zero_redundancy, True)
    for a, b in zip(straight, resumed, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a[0], straight[0][0], strict=True))  # replicas
        assert all(torch.equal(x, y) for x, y in zip(a[0], b[0], strict=True))  # resume
        assert a[1][0] < len(a[0])  # each rank has a part of the states
        for key, state in a[1][1].items():
            packed = [name for name in ("exp_avg", "exp_avg_sq") if isinstance(state[name], dict)]
            for name in packed:
                assert torch.equal(state[name]["codes"], b[1][1][key][name]["codes"])


def sharded_masters() -> bool:
    """Weights of an fp32 model, cast to bf16 and sharded, come back exactly."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 129), nn.Linear(129, 5))
    exact = {name: value.clone() for name, value in model.state_dict().items()}
    masters = stquant.cast_model(model, master_bits=16)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = stquant.AdamW(model.named_parameters(), masters=masters, master_bits=16)
    optimizer.init_state()
    exported = stquant.export_fp32(model, optimizer)
    try:
        stquant.cast_model(fully_shard(nn.Linear(64, 64), mesh=init_device_mesh("cpu", (dist.get_world_size(),))))
    except ValueError as error:
        assert "before it is sharded" in str(error)  # noqa: PT017
    else:
        raise AssertionError("a sharded model was cast")
    return all(torch.equal(full(exported[name]), value) for name, value in exact.items())


def test_masters_of_a_model_that_is_sharded_later(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(3)(sharded_masters) == [True] * 3
