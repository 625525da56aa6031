"""Plans against what real models and optimizers hold after a real step; all bytes are exact."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stquant
from stquant.jobs.contenders import policy_of
from stquant.planning import sources
from stquant.planning.plan import Cost, plan
from stquant.report.memory import held_bytes, state_bytes
from tests.planning import models

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.filterwarnings("default")

CASES: list[tuple[Callable[[], nn.Module], torch.dtype, str, int | str | None]] = [
    (models.gpt2, torch.float32, "2+0", "auto"),
    (models.gpt2, torch.bfloat16, "2+0", "auto"),
    (models.gpt2, torch.float16, "torchao4", "auto"),
    (models.partly_frozen, torch.bfloat16, "4", "auto"),
    (models.llama, torch.bfloat16, "bnb8", 0),
    (models.vit, torch.bfloat16, "4", 3),
    (models.clip, torch.float32, "solo42", "auto"),
    (models.convolutions, torch.float32, "flash8", "auto"),
    (models.convolutions, torch.float64, "2", "auto"),
    (models.odd_shapes, torch.bfloat16, "mulaw5+log3", 16),
    (models.odd_shapes, torch.float32, "fp32", "auto"),
    (models.vit, torch.bfloat16, "adaptive", "auto"),
]


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for param in trained(model):
        param.grad = torch.randn_like(param)
    optimizer.step()


@pytest.mark.parametrize(("make", "dtype", "policy", "master_bits"), CASES)
def test_a_plan_is_what_a_real_step_holds(
    make: Callable[[], nn.Module], dtype: torch.dtype, policy: str, master_bits: int | str | None
) -> None:
    planned = plan(
        sources.of_module("m", make()), {policy: policy_of(policy)}, dtype=dtype, master_bits=master_bits
    ).costs[-1]
    model = make().to(dtype)
    optimizer = stquant.AdamW(trained(model), policy=policy_of(policy), master_bits=master_bits)
    step(model, optimizer)
    ledger = optimizer.ledger()
    assert planned == Cost(
        name=f"STQuant {policy}",
        dtype=str(dtype).removeprefix("torch."),
        weights=held_bytes(model.parameters()) + held_bytes(model.buffers()),
        residual=ledger.residual_bytes,
        gradients=held_bytes(param.grad for param in trained(model)),
        states=ledger.bytes - ledger.residual_bytes,
        elements=2 * sum(param.numel() for param in trained(model)),
        bits=ledger.bits,
        adaptable=True,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_yardstick_is_what_torch_holds(dtype: torch.dtype) -> None:
    costs = plan(sources.of_module("m", models.gpt2()), {"4": policy_of("4")}, dtype=dtype).costs
    torchs = [cost for cost in costs if cost.name == "torch AdamW"]
    assert [cost.dtype for cost in torchs] == (["float32"] if dtype is torch.float32 else ["float32", "bfloat16"])
    model = models.gpt2().to(dtype)
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    assert torchs[-1].states == state_bytes(optimizer)
    assert torchs[-1].weights == held_bytes(model.parameters())


RECORDED = {
    "torch AdamW, fp32": (torch.float32, "auto", "torch AdamW"),
    "2+0, bf16, 8-bit residual": (torch.bfloat16, 8, "STQuant 2+0"),
    "2+0, bf16, 8-bit residual, release": (torch.bfloat16, 8, "STQuant 2+0"),
    "2+0, bf16, 4-bit residual, release": (torch.bfloat16, 4, "STQuant 2+0"),
}
"""Rows of benchmarks/step_memory.py: dtype, bits of the residual, and the plan's name for it."""


def test_a_plan_is_what_recorded_steps_of_gpt2_held() -> None:
    record = json.loads((ROOT / "benchmarks" / "results" / "step_memory.json").read_text())
    assert {row["run"] for row in record["rows"]} == RECORDED.keys()
    for row in record["rows"]:
        dtype, master_bits, name = RECORDED[row["run"]]
        planned = plan(sources.blueprint("gpt2"), {"2+0": policy_of("2+0")}, dtype=dtype, master_bits=master_bits)
        cost = next(cost for cost in planned.costs if cost.name == name)
        held = {"weights": cost.weights, "residuals": cost.residual, "states": cost.states}
        assert held == row["live_bytes"], row["run"]
        assert cost.bits == row["true_bits"]
        if "release" not in row["run"]:
            assert cost.gradients == row["peak_gradient_bytes"]


def test_ranks_share_what_divides() -> None:
    model = sources.of_module("m", nn.Sequential(nn.Linear(192, 256), nn.Linear(256, 64)).bfloat16())
    policies = {name: policy_of(name) for name in ("bnb8", "solo42", "2+0", "3")}
    whole, part = (plan(model, policies, ranks=ranks).costs for ranks in (1, 4))
    steps = 4 * 4
    for one, quarter in zip(whole, part, strict=True):
        assert 4 * quarter.weights == one.weights
        assert 4 * quarter.gradients == one.gradients
        assert 4 * quarter.residual == one.residual
        assert 4 * (quarter.states - steps) == one.states - steps
        assert quarter.bits == one.bits


@pytest.fixture
def four_ranks() -> Iterator[Any]:
    """One process that believes to be the first of four."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield init_device_mesh("cpu", (4,))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("policy", ["2+0", "bnb8", "solo42", "adaptive"])
def test_a_rank_holds_what_was_planned(policy: str, four_ranks: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(33, 130), nn.Linear(130, 66), nn.Linear(66, 3), nn.Conv1d(5, 6, 3)).bfloat16()
    planned = plan(sources.of_module("m", model), {policy: policy_of(policy)}, ranks=4).costs[-1]
    sharded = fully_shard(model, mesh=four_ranks)
    optimizer = stquant.AdamW(sharded.named_parameters(), policy=policy_of(policy))
    optimizer.init_state()
    ledger = optimizer.ledger()
    assert planned.weights == held_bytes(param.to_local() for param in sharded.parameters())
    assert planned.residual == ledger.residual_bytes
    assert planned.states == ledger.bytes - ledger.residual_bytes


def test_what_fits() -> None:
    model = sources.of_module("m", nn.Linear(256, 64, bias=False))
    ours = {name: policy_of(name) for name in ("8", "4", "2+0")}
    weights = gradients = 4 * 256 * 64
    eight = weights + gradients + 256 * 64 * 2 * 8.25 / 8 + 4
    for memory, best in ((eight, "STQuant 8"), (eight - 1, "STQuant 4"), (weights, None)):
        result = plan(model, ours, memory=int(memory), recipes={"bnb8": policy_of("bnb8")})
        assert (result.best.name if result.best else None) == best
    exact = plan(model, ours, memory=int(eight))
    assert exact.bits_that_fit == pytest.approx(8.25, abs=8 * 4 / (2 * 256 * 64))  # the step count takes 4 bytes
    assert plan(model, ours).best is None


def test_a_budget_of_the_room_fills_the_memory() -> None:
    model = sources.of_module("m", nn.Linear(1024, 512))
    memory = 2 * held_bytes(param for _, param in model.parameters) + 300_000
    room = plan(model, {"4": policy_of("4")}, memory=memory).room
    assert room == 300_000
    budgeted = plan(model, {"b": stquant.Budget(bytes=room)}, memory=memory)
    assert budgeted.best is not None
    # The next rung of formats has a bit more for at least one state, which would not fit.
    assert memory - budgeted.best.total < 1024 * 512 // 8


def test_nothing_to_train_is_an_error() -> None:
    model = nn.Linear(4, 4).requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter to train"):
        plan(sources.of_module("m", model), {"4": policy_of("4")})
