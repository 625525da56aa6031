"""Runs that TensorBoard and Weights & Biases writers follow, and run logs that they write."""

from __future__ import annotations

import importlib
import json
import os
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import wandb
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter
from wandb.proto.wandb_internal_pb2 import Record

from stquant.integrations.tensorboard import TensorBoardWriter
from stquant.integrations.wandb import WandbWriter
from stquant.integrations.writers import Writer
from stquant.report import runlog
from tests.report.runs import steps, toy

END = 6
WRITTEN = [1, 2, 4, 6]
"""Steps that a writer writes: the first, and those of the decisions."""

Points = dict[str, dict[int, torch.Tensor]]
"""Numbers by name and step; trackers keep fp32."""


def fp32(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float32)


def followed(writer: Writer, log: Path | None = None, loop: Any = None) -> Points:
    """Train with a writer that follows; return what it should have written."""
    params, optimizer = toy()
    expected: Points = {}
    writer.attach(optimizer)
    recorder = None if log is None else runlog.RunLog(log).attach(optimizer)
    for step in range(1, END + 1):
        steps(optimizer, params, step, step)
        if recorder is not None:
            recorder.loss(step, 1 / step)
        if loop is not None:
            loop(step)
        if step in WRITTEN:
            ledger = optimizer.ledger()
            found = {"state_bytes": ledger.bytes, "state_bits": ledger.bits}
            for decision in optimizer.decisions():
                found |= {"bytes": decision.bytes, "budget": decision.budget}
                found |= {f"bits/{s.parameter}/{s.state}": 8 * s.new_bytes / s.elements for s in decision.states}
            for name, value in found.items():
                expected.setdefault(f"stquant/{name}", {})[step] = fp32(value)
    writer.close()
    if recorder is not None:
        recorder.close()
    steps(optimizer, params, END + 1, END + 2)  # nobody follows any more
    return expected


def contains(found: Points, expected: Points) -> bool:
    """Whether all that is expected was written, and nothing at other steps."""
    return all(found[name] == points for name, points in expected.items())


def events(folder: Path) -> Points:
    reader = EventAccumulator(str(folder)).Reload()
    return {tag: {e.step: fp32(e.value) for e in reader.Scalars(tag)} for tag in reader.Tags()["scalars"]}


def tensorboard(folder: Path) -> None:
    expected = followed(TensorBoardWriter(folder / "live", states=True), folder / "run.jsonl")
    live = events(folder / "live")
    assert contains(live, expected)
    assert live.keys() - expected.keys() == {"stquant/bits", "stquant/damage", "stquant/damage_measured"} | {
        "stquant/changed"
    }
    shared = SummaryWriter(str(folder / "log"))
    TensorBoardWriter(shared).write(runlog.read(folder / "run.jsonl")).close()
    shared.add_scalar("mine", 1.0, 1)  # still open
    shared.close()
    written = events(folder / "log")
    assert written.pop("mine") == {1: fp32(1.0)}
    assert written.pop("stquant/loss") == {step: fp32(float(f"{1 / step:.7g}")) for step in range(1, END + 1)}
    assert written.keys() == {name for name in live if name.count("/") == 1 and "state_" not in name}
    assert all(written[name].keys() == live[name].keys() == {2, 4, 6} for name in written)


def weights_and_biases(folder: Path) -> None:
    """Follow two runs: of a loop that logs nothing itself, and of one that logs every step."""
    os.environ |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    run = wandb.init(dir=folder / "alone", settings=wandb.Settings(console="off"))
    expected = followed(WandbWriter(run, states=True))
    run.finish()
    run = wandb.init(dir=folder / "beside", settings=wandb.Settings(console="off"))
    followed(WandbWriter(run, states=True), loop=lambda step: run.log({"loss": 1 / step}, step=step))
    run.finish()
    wandb.teardown()  # only then are the files complete

    alone, beside = (list(rows(folder / name)) for name in ("alone", "beside"))
    assert [row["stquant/step"] for row in alone] == WRITTEN
    assert contains(points(alone), expected)
    assert [row["loss"] for row in beside if "loss" in row] == [1 / step for step in range(1, END + 1)]
    assert contains(points(beside), expected)


def points(found: list[dict[str, Any]]) -> Points:
    named: Points = {}
    for row in found:
        for name, value in row.items():
            if name.startswith("stquant/"):
                named.setdefault(name, {})[row["stquant/step"]] = fp32(value)
    return named


def rows(folder: Path) -> Iterator[dict[str, Any]]:
    """Read the rows of an offline run: records in chunks that end where a block of 32 KiB does."""
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    data, at, record = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        record += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or the end of one
            parsed = Record()
            parsed.ParseFromString(record)
            record = b""
            if parsed.WhichOneof("record_type") == "history":
                yield {"".join(i.nested_key) or i.key: json.loads(i.value_json) for i in parsed.history.item}


def misused(folder: Path) -> list[str]:
    """Return the errors of what writers refuse."""
    writer = TensorBoardWriter(folder).attach(toy()[1])
    said = []
    for wrong in (lambda: writer.attach(toy()[1]), lambda: TensorBoardWriter(folder).attach(torch.optim.SGD(toy()[0]))):
        try:
            wrong()
        except (RuntimeError, ValueError) as error:
            said.append(str(error))
    return said


def missing() -> dict[str, str]:
    """Return what each file says if its package is not there."""
    said = {}
    for package in ("transformers", "lightning", "tensorboard", "wandb"):
        loaded = [name for name in sys.modules if name.startswith((f"{package}.", "torch.utils.tensorboard"))]
        for name in (package, *loaded):
            sys.modules[name] = None  # type: ignore[assignment]  # importing it fails
        sys.modules.pop(f"stquant.integrations.{package}", None)
        try:
            importlib.import_module(f"stquant.integrations.{package}")
        except ImportError as error:
            said[package] = str(error)
    return said
