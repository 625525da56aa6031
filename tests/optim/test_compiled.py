"""A train step under `torch.compile`: the optimizer's step is one operator in the graph, and the bits stay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import stquant
from stquant.optim import compiled
from stquant.report.memory import tensors_of

# Torch itself warns while it traces what follows `backward()`.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor")

MAKE: dict[str, Callable[..., Any]] = {
    "AdamW": lambda p, **kw: stquant.AdamW(p, **{"lr": 1e-2, "weight_decay": 0.1, "policy": stquant.Fixed(4), **kw}),
    "SGD": lambda p, **kw: stquant.SGD(p, **{"lr": 1e-2, "momentum": 0.9, "policy": stquant.Fixed(4), **kw}),
    "Lion": lambda p, **kw: stquant.Lion(p, **{"lr": 1e-3, **kw}),
}


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


class Run:
    """A small bf16 model and its optimizer; `train` is one whole train step."""

    def __init__(self, make: Callable[..., Any], **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 40)).bfloat16()
        self.optimizer = make(self.model.named_parameters(), **options)
        self.input = torch.randn(4, 32).bfloat16()

    def train(self) -> torch.Tensor:
        loss = self.model(self.input).float().square().mean()
        loss.backward()
        self.optimizer.step()
        for param in self.model.parameters():
            param.grad = None
        return loss.detach()

    def bits(self) -> list[torch.Tensor]:
        state = self.optimizer.state
        return [t.detach() for p in self.model.parameters() for t in (p, *tensors_of(state[p]))]


def assert_alike(ours: Run, truth: Run) -> None:
    for number, (a, b) in enumerate(zip(ours.bits(), truth.bits(), strict=True)):
        assert torch.equal(a, b), number


def breaks() -> int:
    return sum(counters["graph_break"].values())


def compilations() -> int:
    return int(counters["frames"]["ok"])


@pytest.mark.parametrize(
    ("name", "kernels", "backend"),
    [
        ("AdamW", None, "eager"),
        ("SGD", None, "aot_eager"),
        ("Lion", None, "aot_eager"),
        ("AdamW", "reference", "aot_eager"),
        ("AdamW", "triton", "aot_eager"),
    ],
)
def test_learning_rates_compile_nothing_and_bits_stay(
    name: str, kernels: str | None, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the first step, which makes the states, one graph serves every learning rate.

    Its one break is torch's own, at `backward()`.
    """
    if kernels == "triton":
        pytest.importorskip("tests.kernels.triton.interpreting").quicken(monkeypatch)
    truth, ours = (Run(MAKE[name], backend=kernels) for _ in range(2))
    torch.compile(ours.train, backend=backend)()
    torch._dynamo.reset()
    counters.clear()
    step = torch.compile(ours.train, backend=backend)
    truth.train()
    for number in range(3):
        losses = truth.train(), step()
        assert torch.equal(*losses)
        if number == 0:
            once = compilations()
        for run in (truth, ours):
            run.optimizer.param_groups[0]["lr"] *= 0.9
    assert compilations() == once
    assert breaks() == 1
    assert_alike(ours, truth)


def test_the_whole_train_step_is_one_graph() -> None:
    """Where torch traces `backward()`, nothing breaks the graph."""
    truth, ours = (Run(MAKE["AdamW"]) for _ in range(2))
    torch.compile(ours.train, backend="eager")()
    truth.train()
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        step = torch.compile(ours.train, backend="aot_eager", fullgraph=True)
        for _ in range(3):
            truth.train()
            step()
    assert_alike(ours, truth)


def test_schedulers_compile_nothing() -> None:
    run = Run(MAKE["AdamW"])
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(run.optimizer, 20)
    step = torch.compile(run.train, backend="eager")
    step()
    scheduler.step()
    step()
    once = compilations()
    for _ in range(18):
        scheduler.step()
        step()
    assert compilations() == once


def test_a_change_of_formats_compiles_once() -> None:
    truth, ours = (Run(MAKE["AdamW"]) for _ in range(2))
    step = torch.compile(ours.train, backend="eager")
    added = []
    for bits in (4, 8, 5, 4, 8, 5):
        before = compilations()
        for run in (truth, ours):
            run.optimizer.set_policy(stquant.Fixed(bits))
        for _ in range(3):
            truth.train()
            step()
        added.append(compilations() - before)
    assert all(count <= 1 for count in added[1:])
    assert added[3:] == [0, 0, 0]
    assert_alike(ours, truth)


def test_adaptive_decisions_are_those_without_a_compiler() -> None:
    """Steps that measure run outside; others recompile only for formats that are new."""
    policy = stquant.Budget(bits=3.0, every=4)
    truth, ours = (Run(MAKE["AdamW"], policy=policy) for _ in range(2))
    step = torch.compile(ours.train, backend="aot_eager")
    seen = set()
    for number in range(30):
        truth.train()
        step()
        seen.add(tuple(row.format for row in ours.optimizer.ledger().rows))
        if number == 2:
            once = compilations()
    assert_alike(ours, truth)
    assert str(ours.optimizer.decisions()) == str(truth.optimizer.decisions())
    assert len(seen) > 1
    # One more is that of what follows a step outside that is not the first.
    assert compilations() - once <= len(seen)


def closing_over(run: Run) -> Callable[[], torch.Tensor]:
    def closure() -> torch.Tensor:
        run.optimizer.zero_grad()
        loss = run.model(run.input).float().square().mean()
        loss.backward()
        return loss

    return closure


def test_closures_and_missing_gradients() -> None:
    truth, ours = (Run(MAKE["AdamW"]) for _ in range(2))
    for run in (truth, ours):
        run.model[0].bias.requires_grad_(False)
    step = torch.compile(lambda: ours.optimizer.step(closing_over(ours)), backend="eager")
    for number in range(6):
        if number == 3:  # a parameter joins, which has no state yet
            for run in (truth, ours):
                run.model[0].bias.requires_grad_(True)
        assert torch.equal(truth.optimizer.step(closing_over(truth)), step())
    assert_alike(ours, truth)


def test_steps_without_a_compiler_and_loads_may_come_between() -> None:
    truth, ours = (Run(MAKE["AdamW"]) for _ in range(2))
    step = torch.compile(ours.train, backend="eager")
    for _ in range(3):
        truth.train()
        step()
    saved = truth.optimizer.state_dict()
    for run in (truth, ours):
        run.train()
        run.optimizer.load_state_dict(saved)
    for _ in range(2):
        truth.train()
        step()
    assert_alike(ours, truth)


def test_released_gradients_step_outside_of_graphs() -> None:
    truth, ours = (Run(MAKE["AdamW"]) for _ in range(2))
    with stquant.release_gradients(truth.model, truth.optimizer):
        for _ in range(3):
            truth.model(truth.input).float().square().mean().backward()
            truth.optimizer.step()
    with stquant.release_gradients(ours.model, ours.optimizer):
        step = torch.compile(ours.optimizer.step, backend="eager")
        for _ in range(3):
            ours.model(ours.input).float().square().mean().backward()
            step()
    assert_alike(ours, truth)


def test_states_that_others_replaced_are_refused_once() -> None:
    run = Run(MAKE["AdamW"])
    step = torch.compile(run.train, backend="eager")
    step()
    step()
    state = run.optimizer.state[run.model[0].weight]
    state["exp_avg"] = state["exp_avg"].to("cpu").with_tensors(*map(torch.clone, state["exp_avg"].tensors()))
    before = [p.detach().clone() for p in run.model.parameters()]
    with pytest.raises(RuntimeError, match="replaced after its step was compiled"):
        step()
    assert all(torch.equal(a, b) for a, b in zip(before, run.model.parameters(), strict=True))
    step()


@pytest.mark.parametrize("name", MAKE)
def test_the_operator_is_a_good_one(name: str) -> None:
    """Schema, fake, autograd registration, and functionalization, as torch checks them."""
    run = Run(MAKE[name], policy="fp32" if name == "SGD" else stquant.Fixed(6))
    run.train()
    traced = compiled.TracedStep.of(run.optimizer)
    assert traced is not None
    run.optimizer._traced = traced
    params = [param.detach() for param in traced.params]
    grads = [torch.randn(p.shape).to(p.dtype) for p in params]
    buffers = [tensor for found in traced.buffers for tensor in found]
    torch.library.opcheck(
        torch.ops.stquant.step_.default, (traced.optimizer, list(range(len(params))), params, grads, buffers)
    )
