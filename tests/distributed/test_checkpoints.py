"""Checkpoints through torch's own functions: any layout to any other, bit for bit."""

from __future__ import annotations

import functools
import multiprocessing as mp
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import stquant
from tests.distributed.layouts import BLOCK, SIZES, build, contents, differences, full, take_steps
from tests.distributed.ranks import Ranks

Running = tuple[nn.Module, torch.optim.Optimizer]

SAVED_AT, MORE = 3, 20
LAYOUTS = ("single", "ddp", "fsdp 2", "fsdp 3", "fsdp 4", "hsdp", "tp", "fsdp x tp")


@functools.cache
def truth() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what a single process has when it saves, and after the further steps."""
    model, optimizer = build("single", "residual")
    take_steps(model, optimizer, 0, SAVED_AT)
    saved = contents(model, optimizer)
    take_steps(model, optimizer, SAVED_AT, SAVED_AT + MORE)
    return saved, contents(model, optimizer)


def fresh(layout: str) -> Running:
    """Return a model and an optimizer that differ from the saved ones in all that a file brings."""
    model, optimizer = build(layout, "residual", policy=stquant.Fixed(8, block=BLOCK), master_bits=16, seed=9)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    return model, optimizer


def state_of(running: Running, **options: Any) -> dict[str, Any]:
    how = StateDictOptions(**options)
    return {
        "model": get_model_state_dict(running[0], options=how),
        "optim": get_optimizer_state_dict(*running, options=how),
    }


def restore(running: Running, state: dict[str, Any], **options: Any) -> None:
    how = StateDictOptions(**options)
    set_model_state_dict(running[0], state["model"], options=how)
    set_optimizer_state_dict(*running, state["optim"], options=how)


def save_with_dcp(layout: str, folder: str) -> None:
    running = build(layout, "residual")
    take_steps(*running, 0, SAVED_AT)
    dcp.save(state_of(running), checkpoint_id=folder)


def load_with_dcp(layout: str, folder: str) -> Running:
    running = fresh(layout)
    state = state_of(running)
    dcp.load(state, checkpoint_id=folder)
    restore(running, state)
    return running


def loaded_differs(layout: str, folders: list[str], saved: Any, continued: Any) -> list[Any]:
    """Load every checkpoint, continue, and return what differs from a process that never stopped."""
    found = []
    for folder in folders:
        running = load_with_dcp(layout, folder)
        found.append((folder, differences(contents(*running), saved)))
        take_steps(*running, SAVED_AT, SAVED_AT + MORE)
        found.append((folder, differences(contents(*running), continued)))
    return [entry for entry in found if entry[1]]


@pytest.fixture(scope="module")
def saved(ranks: Callable[[int], Ranks], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folders = []
    for layout in LAYOUTS:
        folder = str(tmp_path_factory.mktemp(layout.replace(" ", "-")))
        ranks(SIZES[layout])(save_with_dcp, layout, folder)
        folders.append(folder)
    return folders


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_continues_the_checkpoints_of_all(
    ranks: Callable[[int], Ranks], saved: list[str], layout: str
) -> None:
    for wrong in ranks(SIZES[layout])(loaded_differs, layout, saved, *truth()):
        assert wrong == []


HOW = {
    "sharded": {},
    "flattened": {"flatten_optimizer_state_dict": True},
    "full": {"full_state_dict": True},
    "full, from rank 0": {"full_state_dict": True, "cpu_offload": True, "broadcast_from_rank0": True},
}


def round_trips_differ(layout: str, saved: Any, continued: Any) -> list[Any]:
    """Take the state out in every way torch offers, put it into a fresh optimizer, continue."""
    found = []
    for name, options in HOW.items():
        running = build(layout, "residual")
        take_steps(*running, 0, SAVED_AT)
        taken = dict(options)
        taken.pop("broadcast_from_rank0", None)
        state = state_of(running, **taken)  # on the CPU: empty on all ranks but the first
        other = fresh(layout)
        restore(other, state, **options)
        found.append((name, differences(contents(*other), saved)))
        take_steps(*other, SAVED_AT, SAVED_AT + MORE)
        found.append((name, differences(contents(*other), continued)))
    return [entry for entry in found if entry[1]]


@pytest.mark.parametrize("layout", ["ddp", "replicate", "fsdp 3", "fsdp offload", "fsdp x tp"])
def test_every_way_to_take_and_set_a_state(ranks: Callable[[int], Ranks], layout: str) -> None:
    for wrong in ranks(SIZES[layout])(round_trips_differ, layout, *truth()):
        assert wrong == []


def load_what_one_rank_refuses(layout: str) -> tuple[str, list[str]]:
    """Set a state of which the last rank's shard is damaged; return the error and what it changed."""
    running = build(layout, "residual")
    take_steps(*running, 0, 2)
    state = state_of(running)
    codes = state["optim"]["state"]["experts"]["exp_avg"]["codes"].to_local()
    if dist.get_rank() == dist.get_world_size() - 1:
        codes.view(-1)[-1] = 255
    take_steps(*running, 2, 3)
    before = contents(*running)
    with pytest.raises(stquant.CheckpointError) as caught:
        set_optimizer_state_dict(*running, state["optim"])
    return str(caught.value), differences(contents(*running), before)


@pytest.mark.parametrize("layout", ["fsdp 3", "fsdp x tp"])
def test_a_load_that_fails_on_one_rank_changes_none(ranks: Callable[[int], Ranks], layout: str) -> None:
    *others, last = ranks(SIZES[layout])(load_what_one_rank_refuses, layout)
    assert "parameter 'experts': exp_avg.codes holds more than 4 bits" in last[0]
    assert all("another rank could not load its part" in said for said, _ in others)
    assert all(changed == [] for _, changed in (*others, last))


def save_asynchronously(layout: str, folders: dict[str, str]) -> None:
    mp.current_process()._config["daemon"] = False  # a daemon may not start the process that writes
    os.environ["MASTER_ADDR"] = "127.0.0.1"  # where that process finds the others
    for how, folder in folders.items():
        running = build(layout, "residual")
        take_steps(*running, 0, SAVED_AT)
        kind = AsyncCheckpointerType(how)
        future = dcp.async_save(state_of(running), checkpoint_id=folder, async_checkpointer_type=kind)
        take_steps(*running, SAVED_AT, SAVED_AT + 3)
        future.result()


def test_training_goes_on_while_a_thread_or_a_process_writes(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    folders = {how.value: str(tmp_path / how.value) for how in AsyncCheckpointerType}
    assert folders.keys() == {"thread", "process"}
    writers = Ranks(2)  # of its own, as its writing processes live on
    writers(save_asynchronously, "fsdp 2", folders)
    writers.close()
    assert ranks(1)(loaded_differs, "single", list(folders.values()), *truth()) == [[]]


ADAPTIVE_STEPS = 8


def decided(running: Running, first: int, last: int) -> list[Any]:
    """Take steps; return the last decision after each, and everything at the end."""
    assert isinstance(running[1], stquant.AdamW)
    told = []
    for step in range(first, last):
        take_steps(*running, step, step + 1)
        told.append(str(running[1].decisions()))
    return [told, contents(*running)]


def save_adaptive(layout: str, folder: str) -> None:
    running = build(layout, "adaptive")
    take_steps(*running, 0, SAVED_AT)
    dcp.save(state_of(running), checkpoint_id=folder)


def load_adaptive(layout: str, folder: str, expected: list[Any]) -> tuple[bool, list[str]]:
    """Load into an optimizer of another budget and pace, go on, and compare decisions and contents."""
    running = build(layout, "adaptive", policy=stquant.Budget(bits=6.0, block=BLOCK, every=3), seed=9)
    state = state_of(running)
    dcp.load(state, checkpoint_id=folder)
    restore(running, state)
    told, found = decided(running, SAVED_AT, SAVED_AT + ADAPTIVE_STEPS)
    return told == expected[0], differences(found, expected[1])


@pytest.mark.parametrize(("saves", "loads"), [("fsdp 2", "fsdp 3"), ("hsdp", "single"), ("ddp", "fsdp x tp")])
def test_decisions_go_on_as_if_there_had_been_no_stop(
    ranks: Callable[[int], Ranks], tmp_path: Path, saves: str, loads: str
) -> None:
    straight = build("single", "adaptive")
    take_steps(*straight, 0, SAVED_AT)
    expected = decided(straight, SAVED_AT, SAVED_AT + ADAPTIVE_STEPS)
    assert len(set(expected[0])) > 2
    ranks(SIZES[saves])(save_adaptive, saves, str(tmp_path))
    for alike, wrong in ranks(SIZES[loads])(load_adaptive, loads, str(tmp_path), expected):
        assert wrong == []
        assert alike


def export_whole(layout: str) -> dict[int, Any]:
    model, optimizer = build(layout, "residual")
    take_steps(model, optimizer, 0, SAVED_AT)
    assert isinstance(optimizer, stquant.AdamW)
    states = optimizer.export_state_dict()["state"]
    exported = {i: {key: full(value) for key, value in state.items()} for i, state in states.items()}
    return exported | {-1: {k: full(v) for k, v in stquant.export_fp32(model, optimizer).items()}}


def test_exports_do_not_depend_on_the_layout(ranks: Callable[[int], Ranks]) -> None:
    expected = export_whole("single")
    for exported in ranks(3)(export_whole, "fsdp 3"):
        assert exported.keys() == expected.keys()
        for index, state in expected.items():
            assert all(torch.equal(exported[index][key], value) for key, value in state.items())
