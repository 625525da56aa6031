"""Layouts that are refused: by name, with what would do, on all ranks alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import Shard, distribute_tensor

import stquant
from tests.distributed.layouts import build, contents, differences
from tests.distributed.ranks import Ranks


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
