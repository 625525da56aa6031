"""Failures that users of low-bit optimizers on several ranks have reported elsewhere, one test each."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import stquant
from tests.distributed.layouts import OPTIMIZERS, build, contents, differences, full, names_of, take_steps
from tests.distributed.ranks import Ranks
from tests.distributed.test_checkpoints import HOW, restore, state_of

Contents = dict[str, Any]


class Matrices(nn.Module):
    """Parameters of given shapes, spread over all ranks in one way, or plain."""

    def __init__(self, shapes: list[tuple[int, ...]], placement: Any, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(1)
        for index, shape in enumerate(shapes):
            value = torch.randn(shape).to(dtype)
            if placement is not None:
                value = distribute_tensor(value, init_device_mesh("cpu", (dist.get_world_size(),)), [placement])
            self.register_parameter(f"weight{index}", nn.Parameter(value))


def matrices(shapes: list[tuple[int, ...]], placement: Any, which: str, steps: int) -> tuple[nn.Module, Any]:
    """Train matrices with an optimizer of the table."""
    cls, dtype, options = OPTIMIZERS[which]
    model = Matrices(shapes, placement, dtype)
    optimizer = cls(model.named_parameters(), lr=1e-2, **options)
    take_steps(model, optimizer, 0, steps)
    return model, optimizer


def trained(shapes: list[tuple[int, ...]], placement: Any, which: str, steps: int = 4) -> Contents:
    return contents(*matrices(shapes, placement, which, steps))


ON_TWO_SMALL = [(6, 1024)]
"""Half of it has fewer elements than are packed."""


def test_a_parameter_is_not_packed_only_where_it_is_whole(ranks: Callable[[int], Ranks]) -> None:
    expected = trained(ON_TWO_SMALL, None, "adamw")
    assert "weight0/exp_avg/codes" in expected
    for placement in (Replicate(), Shard(0)):
        for found in ranks(2)(trained, ON_TWO_SMALL, placement, "adamw"):
            assert differences(found, expected) == []


def full_state(layout: str) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Return a state as the full state dict has it, the shapes that the sharded one says, and what a load changes."""
    running, other = build(layout, "recipe"), build(layout, "recipe")
    take_steps(*running, 0, 2)
    whole = state_of(running, full_state_dict=True)
    parts = whole["optim"]["state"]["few"]["exp_avg"]
    shown = state_of(running)["optim"]["state"]["few"]["exp_avg"]
    restore(other, copy.deepcopy(whole), full_state_dict=True)
    for each in (running, other):
        take_steps(*each, 2, 3)
    shapes = {key: tuple(value.shape) for key, value in shown.items() if isinstance(value, Tensor)}
    return parts, shapes, differences(contents(*other), contents(*running))


def test_a_full_state_dict_gathers_scales_of_another_shape_than_the_parameters(ranks: Callable[[int], Ranks]) -> None:
    expected, shapes, _ = full_state("single")
    assert shapes["codes"] == (3, 1500) != shapes["scales"]
    for found, theirs, changed in ranks(2)(full_state, "fsdp 2"):
        assert (differences(found, expected), theirs, changed) == ([], shapes, [])


def every_checkpoint_call(folder: str) -> list[str]:
    """After a single step: take, set, save and load in every way; then one more step."""
    running = build("fsdp 2", "residual")
    take_steps(*running, 0, 1)
    copies = []
    for options in HOW.values():
        taken = {key: value for key, value in options.items() if key != "broadcast_from_rank0"}
        copies.append((state_of(running, **taken), options))
    for name, save in (("plain", dcp.save), ("async", dcp.async_save)):
        state = state_of(running)
        pending = save(state, checkpoint_id=f"{folder}/{name}")
        if name == "async":
            pending.result()
    straight = build("fsdp 2", "residual")
    take_steps(*straight, 0, 2)
    for name in ("plain", "async"):
        state = state_of(build("fsdp 2", "residual"))
        dcp.load(state, checkpoint_id=f"{folder}/{name}")
        copies.append((state, {}))
    wrong = []
    for state, options in copies:
        other = build("fsdp 2", "residual")
        restore(other, state, **options)
        take_steps(*other, 1, 2)
        wrong += differences(contents(*other), contents(*straight))
    return wrong


def test_every_checkpoint_call_works_right_after_the_first_step(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    assert ranks(2)(every_checkpoint_call, str(tmp_path)) == [[], []]


ODD = [(65, 131), (7, 1031)]


@pytest.mark.parametrize("size", [2, 3])
def test_stochastic_rounding_does_not_depend_on_the_number_of_ranks(ranks: Callable[[int], Ranks], size: int) -> None:
    shapes = [*ODD, (1031,)]  # a vector's states are not packed, its weights are rounded all the same
    expected = trained(shapes, None, "bfloat16")
    for placement in (Shard(0), Replicate()):
        for found in ranks(size)(trained, shapes, placement, "bfloat16"):
            assert differences(found, expected) == []


def test_ranks_without_rows_step_and_take_part_in_decisions(ranks: Callable[[int], Ranks]) -> None:
    shapes = [(3, 8), (3, 1500), (1, 4096)]
    expected = trained(shapes, None, "adaptive")
    for found in ranks(4)(trained, shapes, Shard(0), "adaptive"):
        assert differences(found, expected) == []


def save_matrices(folder: str) -> None:
    running = matrices(ODD, Shard(0), "adamw", 3)
    dcp.save(state_of(running), checkpoint_id=folder)


def load_matrices(folder: str) -> tuple[Contents, dict[int, Any]]:
    """Load into a fresh optimizer; return everything, and decoded states."""
    model, optimizer = matrices(ODD, Shard(0), "adamw", 0)
    state = state_of((model, optimizer))
    dcp.load(state, checkpoint_id=folder)
    restore((model, optimizer), state)
    decoded = optimizer.export_state_dict()["state"]
    return contents(model, optimizer), {i: {key: full(v) for key, v in state.items()} for i, state in decoded.items()}


@pytest.fixture
def saved_on_two(ranks: Callable[[int], Ranks], tmp_path: Path) -> str:
    ranks(2)(save_matrices, str(tmp_path))
    return str(tmp_path)


@pytest.mark.parametrize("size", [1, 3, 4])
def test_other_numbers_of_ranks_load_every_element_where_it_belongs(
    ranks: Callable[[int], Ranks], saved_on_two: str, size: int
) -> None:
    """Neither size divides by a number of ranks; nothing may be shifted by padding."""
    _, optimizer = matrices(ODD, None, "adamw", 3)
    for _, decoded in ranks(size)(load_matrices, saved_on_two):
        for index, state in optimizer.export_state_dict()["state"].items():
            for key, value in state.items():
                assert torch.equal(decoded[index][key], value)


def test_a_fresh_optimizer_gets_moments_and_steps_through_the_default_planner(
    ranks: Callable[[int], Ranks], saved_on_two: str
) -> None:
    """Not zeros, no missing key `step`."""
    expected = trained(ODD, None, "adamw", 3)
    assert float(expected["weight0/step/"]) == 3.0
    assert bool(expected["weight0/exp_avg_sq/scales"].all())
    for found, _ in ranks(2)(load_matrices, saved_on_two):
        assert differences(found, expected) == []


def rebuilt() -> list[str]:
    """Formats of an optimizer that a wrapper made anew from the groups of the first."""
    model, optimizer = matrices(ODD, Shard(0), "adamw 3+5", 0)
    again = type(optimizer)(optimizer.param_groups)
    take_steps(model, again, 0, 1)
    return sorted({row.format for row in again.ledger().rows})


def test_a_rebuilt_optimizer_keeps_its_precision(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2)(rebuilt) == [["dynamic3", "fp32", "log5"]] * 2


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(130, 64)
        self.head = nn.Linear(64, 130)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens))


def swapped() -> list[str]:
    """Shard a model with tied weights after its optimizer was made, and swap the parameters in the groups."""
    runs = []
    for wrapped in (False, True):
        model = Tied()
        optimizer = stquant.AdamW(model.named_parameters(), lr=1e-2)
        if wrapped:
            fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
            optimizer.param_groups[0]["params"] = list(model.parameters())
        for step in range(3):
            take_steps(model, optimizer, step, step + 1)
        runs.append(contents(model, optimizer))
    return differences(runs[1], runs[0])


def test_parameters_may_be_swapped_after_construction_tied_ones_too(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2)(swapped) == [[], []]


def how_states_are_shown() -> tuple[bool, list[str]]:
    """Whether states are DTensors that lie as the parameter does, and what a round trip changes."""
    model, optimizer = matrices(ODD, Shard(0), "adamw", 2)
    params = list(model.parameters())
    alike = []
    for index, state in optimizer.state_dict()["state"].items():
        for value in (state["exp_avg"]["codes"], state["exp_avg"]["scales"], state["exp_avg_sq"]["codes"]):
            assert isinstance(value, DTensor)
            alike.append((value.device_mesh, value.placements) == (params[index].device_mesh, params[index].placements))
            alike.append(value.shape[0] == params[index].shape[0])
    before = contents(model, optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    return all(alike), differences(contents(model, optimizer), before)


def test_states_of_sharded_parameters_are_not_saved_as_if_every_rank_had_the_same(
    ranks: Callable[[int], Ranks],
) -> None:
    assert ranks(3)(how_states_are_shown) == [(True, [])] * 3


def frozen_and_unfrozen(layout: str, folder: str) -> list[str]:
    """Train, freeze one parameter, save, load into a fresh optimizer that trains it, go on."""
    results = []
    for stop in (False, True):
        running = build(layout, "adamw")
        take_steps(*running, 0, 2)
        params = dict(names_of(running[0]))
        params["up.weight"].requires_grad_(False)
        if stop:
            dcp.save(state_of(running), checkpoint_id=folder)
            other = build(layout, "adamw")
            state = state_of(other)
            dcp.load(state, checkpoint_id=folder)
            restore(other, state)
            running = other
        dict(names_of(running[0]))["up.weight"].requires_grad_(True)
        take_steps(*running, 2, 4)
        results.append(contents(*running))
    return differences(results[1], results[0])


def test_a_parameter_that_is_frozen_while_saving(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    assert ranks(2)(frozen_and_unfrozen, "fsdp 2", str(tmp_path)) == [[], []]


def replicas_after_training(which: str) -> list[Tensor]:
    """Train under DDP with data of one's own: gradients are averaged, rounding is random."""
    cls, dtype, options = OPTIMIZERS[which]
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(
        nn.Sequential(nn.Linear(64, 130), nn.Tanh(), nn.Linear(130, 64)).to(dtype)
    )
    optimizer = cls(model.named_parameters(), lr=1e-2, **options)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(100):
        model(torch.randn(4, 64, generator=generator).to(dtype)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.check_replicas(dist.group.WORLD)
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("which", ["bfloat16", "adaptive"])
def test_random_rounding_does_not_let_replicas_drift_apart(ranks: Callable[[int], Ranks], which: str) -> None:
    first, second = ranks(2)(replicas_after_training, which)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def release_under_data_parallel() -> list[str]:
    """Ask for gradient release before and after the model is wrapped."""
    said = []
    for wrap_first in (True, False):
        inner = nn.Linear(64, 130)
        optimizer = stquant.AdamW(inner.parameters())
        model: Any = inner
        try:
            if wrap_first:
                model = nn.parallel.DistributedDataParallel(inner)
            stquant.release_gradients(model, optimizer)
            nn.parallel.DistributedDataParallel(inner)(torch.randn(4, 64)).sum().backward()
        except ValueError as error:
            said.append(str(error))
        assert not optimizer.state
    return said


def test_release_before_the_average_of_classic_data_parallel_is_refused(ranks: Callable[[int], Ranks]) -> None:
    for said in ranks(2)(release_under_data_parallel):
        assert len(said) == 2
        assert all("replicas would diverge" in text and "fully_shard" in text for text in said)
