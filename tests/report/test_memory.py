"""What a training step holds, counted on real storages."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import stquant
from stquant.optim.consumed import ConsumedGradient
from stquant.report.memory import held_bytes

WIDTHS = (256, 512, 384, 640, 256)
LARGEST = 384 * 640 + 640 * 256
"""Elements of the two largest weights."""


def network(dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(a, b, bias=False) for a, b in itertools.pairwise(WIDTHS)]
    return nn.Sequential(*layers).to(dtype)


def backward(model: nn.Module) -> None:
    model(torch.ones(4, WIDTHS[0], dtype=next(model.parameters()).dtype)).square().mean().backward()


def test_live_bytes_of_each_kind() -> None:
    model = network()
    count = sum(p.numel() for p in model.parameters())
    optimizer = stquant.AdamW(model.parameters(), policy=stquant.Fixed(8))
    assert stquant.memory.live(model, optimizer) == stquant.memory.Memory(count, 2 * count, 0, 0, 0)
    backward(model)
    optimizer.step()
    now = stquant.memory.live(model, optimizer)
    ledger = optimizer.ledger()
    assert (now.weights, now.residuals, now.gradients) == (2 * count, count, 2 * count)
    assert now.residuals + now.states == ledger.bytes
    assert now.total == 5 * count + now.states
    # Two states of 8 bits with one fp32 scale for 128, and a step count for each of four weights.
    assert now.states == 2 * count + 2 * 4 * count // 128 + 4 * 4
    assert now.per_parameter()["total"] == now.total / count
    assert str(now).startswith("bytes per parameter: weights 2.00, residuals 1.00, states 2.06, gradients 2.00")
    assert str(now).endswith(f"total 7.06 ({count:,} parameters)")


def test_other_optimizers_and_shared_weights_count() -> None:
    model = nn.ModuleList([nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)])
    model[1].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters())
    model[0](torch.ones(1, 64)).sum().backward()
    optimizer.step()
    now = stquant.memory.live(model, optimizer)
    assert (now.parameters, now.weights, now.states, now.gradients) == (4096, 4 * 4096, 8 * 4096 + 4, 4 * 4096)


def test_what_has_no_memory_counts_as_none() -> None:
    assert held_bytes([ConsumedGradient.of(torch.empty(3, 4), "w")]) == 0
    assert held_bytes([torch.empty(5, device="meta")] * 2) == 20, "what it would take, for plans"
    assert held_bytes([torch.empty(1000)[:0]]) == 4000


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("released", [False, True])
def test_peak_of_gradients(released: bool, accumulation: int) -> None:
    model = network()
    count = sum(p.numel() for p in model.parameters())
    optimizer = stquant.AdamW(model.parameters())
    optimizer.init_state()
    release = stquant.release_gradients(model, optimizer) if released else None
    with stquant.memory.peak(model, optimizer) as peak:
        for _ in range(accumulation - 1):
            if release is None:
                backward(model)
            else:
                with release.accumulate():
                    backward(model)
        backward(model)
        optimizer.step()
        optimizer.zero_grad()
    sizes = [p.numel() for p in model.parameters()]
    if accumulation == 1:
        assert peak.each.gradients == 2 * (max(sizes) if released else count)
    else:
        # The gradients of the first micro-batch, and one of the second beside them; with release the
        # last weight's pair is gone when the largest arrives.
        assert peak.each.gradients == 2 * (count + (sizes[-1] if released else max(sizes)))
    assert peak.together.gradients == peak.each.gradients
    assert peak.each.states == stquant.memory.live(model, optimizer).states
    assert peak.allocated == {}  # counted on CUDA only


def allocated(model: nn.Module, optimizer: Any) -> int:
    """Peak bytes that torch's CPU allocator gives out during a step, over what was live before.

    Without oneDNN, which on processors with bf16 instructions takes scratch memory for its products.
    """
    with (
        torch.backends.mkldnn.flags(enabled=False),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record,
    ):
        backward(model)
        optimizer.step()
        optimizer.zero_grad()
    assert record.profiler is not None
    events = [e for e in record.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


CONSTANT = 64 * 1024
"""Activations of four samples, noise and loss; scratch memory of the compiled kernels is not torch's."""


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_allocator_agrees() -> None:
    """With release at most the two largest gradients and a constant, without it all of them."""
    model = network()
    count = sum(p.numel() for p in model.parameters())
    optimizer = stquant.AdamW(model.parameters())
    optimizer.init_state()
    assert 2 * count <= allocated(model, optimizer) <= 2 * count + CONSTANT
    with stquant.release_gradients(model, optimizer):
        assert allocated(model, optimizer) <= 2 * LARGEST + CONSTANT


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_peak_on_cuda() -> None:
    model = network().cuda()
    count = sum(p.numel() for p in model.parameters())
    optimizer = stquant.AdamW(model.parameters())
    with stquant.memory.peak(model, optimizer) as peak:
        model(torch.ones(4, WIDTHS[0], dtype=torch.bfloat16, device="cuda")).square().mean().backward()
        optimizer.step()
    assert peak.each.gradients == 2 * count
    assert all(most >= peak.together.total for most in peak.allocated.values())


def test_a_tensor_made_of_others_counts_with_those() -> None:
    """Other packages keep quantized states as such tensors; their own storage is empty."""

    class Halves(torch.Tensor):
        codes: torch.Tensor
        scale: torch.Tensor

        @staticmethod
        def __new__(cls: type[Halves], codes: torch.Tensor, scale: torch.Tensor) -> Halves:
            made: Halves = torch.Tensor._make_wrapper_subclass(cls, (2 * codes.numel(),), dtype=torch.float32)
            made.codes, made.scale = codes, scale
            return made

        def __tensor_flatten__(self) -> tuple[list[str], None]:
            return ["codes", "scale"], None

        @staticmethod
        def __tensor_unflatten__(parts: dict[str, torch.Tensor], *_: Any) -> Halves:
            return Halves(parts["codes"], parts["scale"])

        @classmethod
        def __torch_dispatch__(cls, *_: Any) -> Any:
            raise NotImplementedError

    codes, scale = torch.zeros(100, dtype=torch.uint8), torch.zeros(3)
    assert held_bytes([Halves(codes, scale), scale]) == 100 + 12
