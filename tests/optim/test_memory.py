"""Steps, saving and loading need no more memory than they must, and leave nothing behind."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensor

import stquant
from stquant.codecs.format import Format
from stquant.policy import transition
from stquant.storage.packed import PackedState
from tests.optim.helpers import gradients, parameters, run

MIB = 2**20


@dataclass
class Peak:
    """Bytes that torch's allocator gave out and has not got back: at the end, and at most."""

    now: int = 0
    highest: int = 0


@contextmanager
def allocations() -> Iterator[Peak]:
    """Watch the allocator; unlike a dispatch mode this also sees copies of storages."""
    peak = Peak()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        yield peak
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        peak.now += event.nbytes()
        peak.highest = max(peak.highest, peak.now)


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def living_bytes() -> int:
    """Bytes of all storages that a tensor of this process holds; those that a compiler left hold none."""
    gc.collect()
    kinds = [(type(x), x) for x in gc.get_objects()]
    tensors = [x for kind, x in kinds if issubclass(kind, torch.Tensor) and not issubclass(kind, FakeTensor)]
    return sum({_place(t): t.untyped_storage().nbytes() for t in tensors}.values())


def test_the_meter_sees_copies() -> None:
    values = torch.zeros(MIB)
    with allocations() as peak:
        values.add_(1.0)
        copied = copy.deepcopy(values)
        values.double().neg_()
        del copied
    assert (peak.now, peak.highest) == (0, 12 * MIB)


@pytest.mark.parametrize("cls", [stquant.AdamW, stquant.SGD, stquant.Lion])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["reference", None])
def test_what_a_step_makes_does_not_grow_with_the_parameter(cls: Any, dtype: torch.dtype, backend: str | None) -> None:
    options = {"momentum": 0.9} if cls is stquant.SGD else {}
    highest = []
    for rows in (512, 1024):
        param = torch.nn.Parameter(torch.zeros(rows, 1024, dtype=dtype))
        param.grad = torch.ones_like(param)
        optimizer = cls([param], lr=1e-3, backend=backend, **options)
        optimizer.init_state()
        with allocations() as peak:
            optimizer.step()
        highest.append(peak.highest)
    # Two scalars, such as the step count read back, may live at different moments.
    assert abs(highest[1] - highest[0]) <= 64


def test_the_extra_memory_of_a_step_is_a_constant() -> None:
    """One parameter of 16 million elements: a fp32 copy of it would be 64 MB."""
    script = """
import resource, torch, stquant
torch.set_num_threads(1)
p = torch.nn.Parameter(torch.zeros(16384, 1024))
p.grad = torch.ones_like(p)
small = torch.nn.Parameter(torch.zeros(256, 1024))
small.grad = torch.ones_like(small)
stquant.AdamW([small]).step()
o = stquant.AdamW([p])
o.init_state()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
o.step()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 16, "MiB beyond the states, which init_state made"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_stays_behind_after_a_step_or_a_load(dtype: torch.dtype) -> None:
    params = parameters(dtype=dtype)
    optimizer = stquant.AdamW(params, lr=1e-2)
    run(optimizer, params, gradients(params, 1))
    first = living_bytes()
    actions: list[Callable[[], object]] = [
        lambda: run(optimizer, params, gradients(params, 2)),
        lambda: optimizer.load_state_dict(optimizer.state_dict()),
        optimizer.export_state_dict,
        optimizer.ledger,
    ]
    for action in actions:
        action()
        assert living_bytes() == first


@pytest.mark.parametrize("source", ["ours", "torch"])
def test_loading_holds_the_old_and_the_new_states_and_one_tensor_more(source: str) -> None:
    """The old states must stay until the file has proved sound; 16 parameters, so that one is little."""
    params = parameters([(256, 1024)] * 16)
    make = stquant.AdamW if source == "ours" else torch.optim.AdamW
    theirs = make(params, lr=1e-2)
    run(theirs, params, gradients(params, 1))
    saved = theirs.state_dict()
    optimizer = stquant.AdamW(params)
    optimizer.load_state_dict(saved)
    with allocations() as peak:
        optimizer.load_state_dict(saved)
    dense = params[0].numel() * 4
    # Checks make masks of a tensor's size, and blocks are packed piece by piece.
    assert peak.highest <= optimizer.ledger().bytes + 3 * dense


def test_a_transition_holds_one_packed_state_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every state changes in one decision, half of them to the narrowest format and half to the widest."""
    params = parameters([(1024, 1024)] * 6)
    optimizer = stquant.AdamW(params, policy=stquant.Budget(bits=7.0, every=1))
    run(optimizer, params, gradients(params, 2))
    turns = 1

    def everything(table: Any, current: torch.Tensor, *_: object) -> transition.Plan:
        nonlocal turns
        turns += 1
        last = (torch.diff(table.bytes, dim=1) > 0).sum(1)
        narrow = (torch.arange(len(current)) + turns) % 2 == 0
        return transition.Plan(torch.where(narrow, 0, last), 0.0)

    states = [state for p in params for state in optimizer.state[p].values() if isinstance(state, PackedState)]
    known = [weakref.ref(tensor) for state in states for tensor in state.tensors()]
    living: list[int] = []
    recode = PackedState.recode

    def held() -> int:
        return sum(tensor.nbytes for reference in known if (tensor := reference()) is not None)

    def watched(state: PackedState, format: Format) -> PackedState:
        made = recode(state, format)
        known.extend(map(weakref.ref, made.tensors()))
        living.append(held())
        return made

    monkeypatch.setattr(transition, "plan", everything)
    monkeypatch.setattr(PackedState, "recode", watched)
    del states
    for _ in range(3):
        before = held()
        living.clear()
        optimizer.step()
        assert len(living) == 2 * len(params)
        widest = max(row.bytes for row in optimizer.ledger().rows)
        assert max(living) <= max(before, held()) + widest
