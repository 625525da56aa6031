"""Files of distributed checkpoints: killed while written, compressed, in bounded memory."""

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
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import stquant
from stquant.distributed.tensors import local
from tests.distributed.layouts import build, take_steps
from tests.distributed.ranks import Ranks
from tests.distributed.test_checkpoints import SAVED_AT, loaded_differs, save_with_dcp, state_of, truth
from tests.optim.test_memory import allocations


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


COMPRESSED: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "default": (torch.float32, {}),
    "2 + 1 bits": (torch.float32, {"policy": stquant.Fixed(exp_avg=2, exp_avg_sq=1)}),
    "3 bits": (torch.float32, {"policy": stquant.Fixed(3)}),
    "5 bits": (torch.float32, {"policy": stquant.Fixed(5)}),
    "8 bits": (torch.float32, {"policy": stquant.Fixed(8)}),
    "residuals": (torch.bfloat16, {"policy": stquant.Fixed(exp_avg=2, exp_avg_sq=1)}),
    "torchao4": (torch.float32, {"policy": "torchao4"}),
}
LARGEST_FILE = 1.1
"""Bytes of a compressed file per byte of live states. Codes are nearly as random as their bits allow, so
it cannot be much below 1; metadata, and a match per block for the bytes that it leaves, come on top."""


def compressed_sizes(folder: str) -> dict[str, float]:
    """Return the bytes of files written with torch's zstd extension per byte that live states hold."""
    from torch.distributed.checkpoint._extension import ZStandard

    found = {}
    for name, (dtype, options) in COMPRESSED.items():
        torch.manual_seed(0)
        model = nn.Linear(1024, 512, bias=False).to(dtype)
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        optimizer = stquant.AdamW(model.named_parameters(), **options)
        for _ in range(3):
            model(torch.randn(64, 1024).to(dtype)).float().square().mean().backward()
            optimizer.step()
        place = Path(folder, name)
        writer = FileSystemWriter(place, _extensions=[ZStandard()])
        dcp.save({"optim": get_optimizer_state_dict(model, optimizer)}, storage_writer=writer)
        held = torch.tensor(sum(row.bytes for row in optimizer.ledger().rows))
        dist.all_reduce(held)
        found[name] = sum(file.stat().st_size for file in place.iterdir()) / int(held)
    return found


def test_a_compressed_file_is_hardly_larger_than_packed_bits(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    pytest.importorskip("zstandard")
    for found in ranks(2)(compressed_sizes, str(tmp_path)):
        assert found.keys() == COMPRESSED.keys()
        assert {name: ratio for name, ratio in found.items() if ratio > LARGEST_FILE} == {}


TENSORS = 16
TENSORS_AT_ONCE = 4
"""Presented tensors, of 16 parameters, that torch and we may hold beside what is counted, for buffers and checks."""


def memory_of_a_checkpoint(folder: str, dtype: torch.dtype) -> dict[str, float]:
    """Return what every part of a save and a load allocates at most, in presented tensors of one parameter."""
    model = nn.ParameterList(torch.zeros(256, 1024, dtype=dtype) for _ in range(TENSORS))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = stquant.AdamW(model.named_parameters(), policy=stquant.Fixed(exp_avg=2, exp_avg_sq=1))
    optimizer.init_state()
    live, peaks = sum(row.bytes for row in optimizer.ledger().rows), {}
    with allocations() as peak:
        state = get_optimizer_state_dict(model, optimizer)
    presented = sum(tensor.numel() * tensor.itemsize for tensor in shown(state))
    peaks["take"] = peak.highest - presented
    with allocations() as peak:
        dcp.save({"optim": state}, checkpoint_id=folder)
    peaks["save"] = peak.highest
    with allocations() as peak:
        dcp.load({"optim": state}, checkpoint_id=folder)
    peaks["load"] = peak.highest
    with allocations() as peak:
        set_optimizer_state_dict(model, optimizer, state)
    peaks["set"] = peak.highest - live
    largest = max(tensor.numel() * tensor.itemsize for tensor in shown(state))
    return {name: value / largest for name, value in peaks.items()}


def shown(state: Any) -> list[torch.Tensor]:
    """Local parts of all tensors in a state dict."""
    if isinstance(state, torch.Tensor):
        return [local(state)]
    values = state.values() if isinstance(state, dict) else state if isinstance(state, list) else ()
    return [tensor for value in values for tensor in shown(value)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saving_and_loading_hold_a_shard_once_more_and_a_few_tensors(
    ranks: Callable[[int], Ranks], tmp_path: Path, dtype: torch.dtype
) -> None:
    """The presented shard while it is taken and written; new live states beside the old while it is set."""
    for peaks in ranks(2)(memory_of_a_checkpoint, str(tmp_path), dtype):
        assert {name: value for name, value in peaks.items() if value > TENSORS_AT_ONCE} == {}
