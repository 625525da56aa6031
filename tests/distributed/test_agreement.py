"""Statistics that all ranks agree on, and what tells when replicas do not."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import stquant
from stquant.distributed import agreement
from stquant.distributed.tensors import box_of, local
from stquant.errors import AgreementError
from tests.distributed.layouts import SIZES, build, names_of, take_steps
from tests.distributed.ranks import Ranks

MAXIMA = 2


def statistics(layout: str) -> tuple[list[list[int]], int]:
    """Return sums and maxima of a tensor of known integers per parameter, and the collectives it took."""
    model, _ = build(layout, "adamw")
    entries = []
    for index, (_, param) in enumerate(names_of(model)):
        # Norm's gradient may be missing on this rank: nothing here depends on gradients.
        numbers = torch.arange(param.numel()).view(param.shape) * (index + 1) - 7
        box = box_of(param)
        for dim, (start, size) in enumerate(zip(box.start, box.shape, strict=True) if box else ()):
            numbers = numbers.narrow(dim, start, size)
        top = int(numbers.max()) if numbers.numel() else -(1 << 62)
        entries.append((param, torch.tensor([int(numbers.sum()), numbers.numel(), index - index, top, -index])))
    with mock.patch.object(dist, "all_reduce", side_effect=dist.all_reduce) as reduce:
        combined = agreement.reduce_stats(entries, maxima=MAXIMA)
    return [vector.tolist() for vector in combined], reduce.call_count


BUCKET_DIMS = {"ddp": 0, "replicate": 0, "fsdp 3": 1, "fsdp 4": 1, "hsdp": 1, "tp": 1, "fsdp x tp": 3}
"""Buckets times the mesh dimensions that shard each: `fsdp x tp` has (dp), 1, and (dp, tp), 2."""


@pytest.mark.parametrize("layout", BUCKET_DIMS)
def test_all_ranks_have_the_statistics_of_the_whole(ranks: Callable[[int], Ranks], layout: str) -> None:
    expected, none = statistics("single")
    assert none == 0
    for result, collectives in ranks(SIZES[layout])(statistics, layout):
        assert result == expected
        assert collectives == 2 * BUCKET_DIMS[layout]  # sums, and maxima


def decision_collectives(layout: str) -> list[int]:
    """Collectives of three steps, of which the second takes a decision, beside those that gradients need."""
    model, optimizer = build(layout, "adaptive")
    counts = []
    for step in range(3):
        with mock.patch.object(dist, "all_reduce", side_effect=dist.all_reduce) as reduce:
            take_steps(model, optimizer, step, step + 1)
        counts.append(reduce.call_count)
    return counts


@pytest.mark.parametrize("layout", BUCKET_DIMS)
def test_a_decision_takes_one_collective_per_bucket_and_dimension(ranks: Callable[[int], Ranks], layout: str) -> None:
    assert ranks(SIZES[layout])(decision_collectives, layout) == [[0, BUCKET_DIMS[layout], 0]] * SIZES[layout]


def a_gradient_is_missing(at: int) -> list[str]:
    """One rank has no gradient of one parameter in one step; return what every step says."""
    model, optimizer = build("fsdp 2", "adaptive")
    said = []
    for step in range(2):
        if step == at and dist.get_rank() == 1:
            dict(names_of(model))["down.weight"].requires_grad_(False)  # `take_steps` leaves frozen ones alone
        try:
            take_steps(model, optimizer, step, step + 1)
            said.append("")
        except AgreementError as error:
            said.append(str(error))
        dict(names_of(model))["down.weight"].requires_grad_(True)
    return said


@pytest.mark.parametrize("at", [0, 1], ids=["in a step before", "in the step that decides"])
def test_a_gradient_that_one_rank_lacks_raises_on_all(ranks: Callable[[int], Ranks], at: int) -> None:
    """Steps of a parameter would no longer be counted alike; ranks must neither hang nor decide apart."""
    for said in ranks(2)(a_gradient_is_missing, at):
        assert said[0] == ""
        assert "'down.weight' was measured on 1 of 2 ranks that share it" in said[1]


def plain_statistics() -> list[int]:
    param, vector = torch.zeros(3), torch.tensor([dist.get_rank(), 5])
    kept = agreement.reduce_stats([(param, vector)])[0]
    assert torch.equal(kept, vector)
    return agreement.reduce_stats([(param, vector)], process_group=dist.group.WORLD)[0].tolist()


def test_plain_replicas_take_the_statistics_of_the_first(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2)(plain_statistics) == [[0, 5]] * 2


def formats_of_replicas(given: bool) -> list[str]:
    """Formats on a replica whose gradients are not those of the other; its optimizer may know the group."""
    model, optimizer = build("single", "adaptive", process_group=dist.group.WORLD if given else None)
    for step in range(8):
        for index, (_, param) in enumerate(names_of(model)):
            torch.manual_seed(100 * step + index)
            tails = 1 + 6 * ((index // 2 + dist.get_rank()) % 2)
            param.grad = torch.randn(param.shape).pow(tails).to(param.dtype)
        optimizer.step()
    assert isinstance(optimizer, stquant.AdamW)
    assert copy.deepcopy(optimizer)._replicas.group is optimizer._replicas.group
    if given:
        with pytest.raises(TypeError, match="process_group= cannot be pickled; save its state_dict"):
            pickle.dumps(optimizer)
    return [row.format for row in optimizer.ledger().rows]


def test_a_process_group_makes_plain_replicas_decide_alike(ranks: Callable[[int], Ranks]) -> None:
    apart, together = ranks(2)(formats_of_replicas, False), ranks(2)(formats_of_replicas, True)
    assert apart[0] != apart[1]
    assert together[0] == together[1] == apart[0]


def test_a_process_group_is_one() -> None:
    with pytest.raises(ValueError, match="process_group='gloo' is no process group"):
        stquant.AdamW([torch.nn.Parameter(torch.zeros(3))], process_group="gloo")


def check_after_a_difference(layout: str, name: str) -> list[str]:
    """Return what a check says before and after one bit of one rank's state is changed."""
    model, optimizer = build(layout, "residual")
    assert isinstance(optimizer, stquant.AdamW)
    take_steps(model, optimizer, 0, 2)
    group: Any = dist.group.WORLD if layout == "ddp" else None
    said = []
    for _ in range(2):
        try:
            optimizer.check_replicas(group)
            said.append("")
        except AgreementError as error:
            said.append(str(error))
        if dist.get_rank() == 0:
            codes = optimizer.state[dict(names_of(model))[name]]["exp_avg"].codes
            codes.view(-1)[-1] ^= 1
    return said


@pytest.mark.parametrize("layout", ["ddp", "replicate", "hsdp"])
def test_a_replica_that_differs_is_named(ranks: Callable[[int], Ranks], layout: str) -> None:
    results = ranks(SIZES[layout])(check_after_a_difference, layout, "down.weight")
    assert all(before == "" for before, _ in results)
    for rank, (_, after) in enumerate(results):
        assert ("'down.weight'" in after) == (layout != "hsdp" or rank % 2 == 0), (rank, after)


def test_every_bit_changes_the_fingerprint() -> None:
    codes = torch.randint(0, 256, (37,), dtype=torch.uint8)
    before = agreement._fingerprint([codes, codes[:5]])
    for at in range(codes.numel()):
        for bit in range(8):
            changed = codes.clone()
            changed[at] ^= 1 << bit
            assert agreement._fingerprint([changed, codes[:5]]) != before


def test_local_is_the_tensor_itself_without_ranks() -> None:
    tensor = torch.zeros(3, requires_grad=True)
    assert local(tensor).data_ptr() == tensor.data_ptr()
