"""What users of sharded low-bit optimizers have run into elsewhere, and refusals."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import stquant
from tests.distributed.layouts import build, contents, differences, full, names_of, take_steps
from tests.distributed.ranks import Ranks
from tests.distributed.test_checkpoints import SAVED_AT, loaded_differs, restore, save_with_dcp, state_of, truth


def refusal(shape: tuple[int, ...], placements: Any, dtype: torch.dtype = torch.float32, **options: Any) -> str:
    """Return what an optimizer says to a parameter of this layout; empty if it takes it."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    param = nn.Parameter(distribute_tensor(torch.zeros(shape, dtype=dtype), mesh, placements))
    try:
        stquant.AdamW([("layer.weight", param)], **options).init_state()
    except ValueError as error:
        return str(error)
    return ""


def test_a_cut_inside_a_block_is_refused_on_all_ranks(ranks: Callable[[int], Ranks]) -> None:
    for said in ranks(3)(refusal, (64, 256), [Shard(1)]):
        assert "'layer.weight'" in said
        assert "at elements 86, 172 of rows of 256, inside blocks of 128" in said
        assert "dimension 0" in said
    for said in ranks(2)(refusal, (64, 192), [Shard(1)]):
        assert "block=32" in said
    assert ranks(2)(_refusal_with_block, (64, 192), 32) == ["", ""]
    assert ranks(2)(refusal, (64, 256), [Shard(1)]) == ["", ""]
    for said in ranks(2)(refusal, (64, 16, 4, 4), [Shard(2)]):
        assert "'layer.weight' cannot be sharded like that: dimension 2" in said


def _refusal_with_block(shape: tuple[int, ...], block: int) -> str:
    return refusal(shape, [Shard(1)], policy=stquant.Fixed(4, block=block))


def test_short_parameters_may_be_cut_anywhere(ranks: Callable[[int], Ranks]) -> None:
    """A bf16 vector has a residual, which has no scales."""
    assert ranks(3)(refusal, (131,), [Shard(0)], torch.bfloat16) == [""] * 3


def test_a_file_whose_blocks_are_cut_is_refused(ranks: Callable[[int], Ranks]) -> None:
    assert all("'down.weight'" in said and "block=64" in said for said in ranks(4)(_load_other_blocks))


def _load_other_blocks() -> str:
    _, wide = build("single", "adamw", policy=stquant.Fixed(4, block=128))
    assert isinstance(wide, stquant.AdamW)
    wide.init_state()
    model, optimizer = build("tp 4", "adamw")
    before = contents(model, optimizer)
    try:
        optimizer.load_state_dict(wide.state_dict())
    except ValueError as error:
        assert differences(contents(model, optimizer), before) == []
        return str(error)
    return ""


def flattening_is_refused(original: bool) -> str:
    model = FullyShardedDataParallel(nn.Linear(64, 128), use_orig_params=original, device_id=torch.device("cpu"))
    try:
        stquant.AdamW(model.parameters())
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("original", [False, True])
def test_fsdp1_is_refused(ranks: Callable[[int], Ranks], original: bool) -> None:
    assert all("fully_shard (FSDP2)" in said for said in ranks(2)(flattening_is_refused, original))


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


def eligibility(layout: str) -> list[tuple[str, str, str]]:
    _, optimizer = build(layout, "adamw")
    assert isinstance(optimizer, stquant.AdamW)
    optimizer.init_state()
    return [(row.parameter, row.state, row.format) for row in optimizer.ledger().rows]


def test_formats_are_those_of_the_whole_parameter(ranks: Callable[[int], Ranks]) -> None:
    """Rank by rank `few` (3 x 1500) has fewer elements than are packed, or none."""
    expected = eligibility("single")
    assert ("few", "exp_avg", "dynamic2") in expected
    assert ranks(4)(eligibility, "fsdp 4") == [expected] * 4


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


class Killed(FileSystemWriter):
    """Rank 1 is killed when it is to write its part."""

    def write_data(self, *arguments: Any) -> Any:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().write_data(*arguments)


def die_while_saving(folder: str) -> None:
    running = build("fsdp 2", "residual")
    take_steps(*running, 0, SAVED_AT + 1)
    dcp.save(state_of(running), storage_writer=Killed(folder))


def test_a_killed_rank_leaves_the_previous_checkpoint(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    doomed = Ranks(2)
    doomed(save_with_dcp, "fsdp 2", str(first))
    doomed.start(die_while_saving, str(second))
    doomed.processes[1].join(60)
    assert doomed.processes[1].exitcode == -signal.SIGKILL
    doomed.close()
    assert not (second / ".metadata").exists(), "what was not finished does not look like a checkpoint"
    for wrong in ranks(3)(loaded_differs, "fsdp 3", [str(first)], *truth()):
        assert wrong == []


def wrapped_after_construction() -> bool:
    """A wrapper swaps the parameters in the groups before the first step."""
    model, optimizer = build("single", "adamw")
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    params = dict(names_of(model))
    optimizer.param_groups[0]["params"] = [params[name] for name in optimizer.param_groups[0]["param_names"]]
    take_steps(model, optimizer, 0, 3)
    plain = build("single", "adamw")
    take_steps(*plain, 0, 3)
    return differences(contents(model, optimizer), contents(*plain)) == []


def test_parameters_may_be_swapped_before_the_first_step(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2)(wrapped_after_construction) == [True, True]


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


def adaptive_goes_on(layout: str) -> list[Any]:
    """Save an adaptive policy's state between two decisions, go on with it in a fresh optimizer."""
    whole, other = build(layout, "adaptive"), build(layout, "adaptive")
    take_steps(*whole, 0, 3)
    restore(other, state_of(whole))
    for running in (whole, other):
        take_steps(*running, 3, 6)
    assert whole[1].decisions() == other[1].decisions() != ()  # type: ignore[attr-defined]
    return differences(contents(*other), contents(*whole))


@pytest.mark.parametrize("count", [2, 3])
def test_an_adaptive_policy_goes_on_from_a_checkpoint(ranks: Callable[[int], Ranks], count: int) -> None:
    """What it remembers has a row for each state and belongs to the whole parameter: no rank may cut it."""
    assert ranks(count)(adaptive_goes_on, f"fsdp {count}") == [[]] * count


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


def compressed_size(folder: str) -> tuple[int, int]:
    """Return the bytes of a file written with torch's zstd extension, and those that live states hold."""
    from torch.distributed.checkpoint._extension import ZStandard

    torch.manual_seed(0)
    model = fully_shard(nn.Linear(1024, 1024, bias=False), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = stquant.AdamW(model.named_parameters(), policy=stquant.Fixed(4))
    for _ in range(5):
        model(torch.randn(64, 1024)).square().mean().backward()
        optimizer.step()
    writer = FileSystemWriter(folder, _extensions=[ZStandard()])
    dcp.save({"optim": state_of((model, optimizer))["optim"]}, storage_writer=writer)
    held = torch.tensor(sum(row.bytes for row in optimizer.ledger().rows))
    dist.all_reduce(held)
    return sum(file.stat().st_size for file in Path(folder).iterdir()), int(held)


def test_a_compressed_file_is_hardly_larger_than_packed_bits(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    pytest.importorskip("zstandard")
    for size, held in ranks(2)(compressed_size, str(tmp_path)):
        assert size <= 1.1 * held
