"""What a launch hands to its kernel: a table of records, and which of them each program works on.

Both go to the device without waiting for it. Every launch of this backend passes here.
"""

from __future__ import annotations

import contextlib
import functools
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stquant.codecs.blocks import Grid, Strides
from stquant.kernels.ops import Rule
from stquant.kernels.triton import capturing

_RECORD = struct.Struct("=3q 4Q" + "Q Q Q q q" * 3 + "f4x" * 9 + "4q 8x")
"""The numbers of a record, in the order of `records`."""

Constants = tuple[float, ...]

THREADS = 128
"""Threads of a program."""


def options(lanes: int) -> dict[str, int | bool]:
    """Options of every launch, on warps of `lanes` threads.

    A fused multiply-add would round once where the reference rounds twice. Without a limit on
    registers CUDA's assembler sets one of its own now and then, and spills.
    """
    limit = {"maxnreg": 255} if lanes == 32 else {}
    return {"num_warps": THREADS // lanes, "enable_fp_fusion": False, **limit}


_OPTIONS = options(64 if torch.version.hip else 32)


class Variant(NamedTuple):
    """What one launch has in common: where it runs, and the compile-time constants of its kernel."""

    device: torch.device
    constants: tuple[tuple[str, int], ...]


class Record(NamedTuple):
    """One parameter's part of a launch."""

    grid: Grid
    fields: tuple[int, ...]
    constants: Constants
    strides: Strides = Strides(0)
    """Where rows lie in the whole parameter."""
    counter: Tensor | None = None


def start(kernel: Any, variant: Variant, records: Sequence[Record], rule: Rule | None = None) -> None:
    """Launch `kernel` once for all records; a rule completes those that have counters."""
    constants = dict(variant.constants)
    per_chunk = constants["BLOCKS"]
    packed, counts, first_chunk = bytearray(), [], 0
    for record in records:
        blocks, row = _size(record.grid)
        packed += _RECORD.pack(first_chunk, blocks, row, *record.fields, *record.constants, *_strides(record.strides))
        counts.append(-(-blocks // per_chunk))
        first_chunk += counts[-1]
    table = _to_device(torch.frombuffer(packed, dtype=torch.int64), variant.device)
    counters = [record.counter for record in records if record.counter is not None]
    if counters:
        capturing.finish_(table.view(len(records), -1), counters, rule)  # type: ignore[arg-type]
    # A graph gets a table of its own: its memory holds nothing before the first replay.
    make = _make_chunk_table if _is_capturing(variant.device) else _chunk_table
    chunks = make(tuple(counts), variant.device)
    with torch.cuda.device(variant.device) if variant.device.type == "cuda" else contextlib.nullcontext():
        run(kernel, first_chunk, table, chunks, constants)


def run(kernel: Any, programs: int, table: Tensor, chunks: Tensor, constants: dict[str, int]) -> None:
    """Start `programs` programs of a kernel; every launch of this backend passes here."""
    kernel[(programs,)](table, chunks, **constants, **_OPTIONS)


@functools.lru_cache(maxsize=4096)
def _size(grid: Grid) -> tuple[int, int]:
    return grid.rows * grid.blocks_per_row, grid.row


def _strides(strides: Strides) -> tuple[int, int, int, int]:
    return strides.origin, strides.run, strides.jump, strides.pitch


def _make_chunk_table(counts: tuple[int, ...], device: torch.device) -> Tensor:
    """Which record each program works on."""
    table = torch.repeat_interleave(torch.arange(len(counts), dtype=torch.int32), torch.tensor(counts))
    return _to_device(table, device)


_chunk_table = functools.lru_cache(maxsize=32)(_make_chunk_table)
"""The same, kept because it changes with formats and shapes only."""

_captured: list[Tensor] = []
"""Tables that captured graphs copy from at each replay; nobody tells when a graph is gone."""


def _to_device(table: Tensor, device: torch.device) -> Tensor:
    """Copy a table without waiting for the device."""
    if device.type == "cpu":
        return table
    pinned = table.pin_memory()
    if _is_capturing(device):
        _captured.append(pinned)
    return pinned.to(device, non_blocking=True)


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
