"""Gradient release: the bits of the normal step, freed gradients, and loops that it cannot serve."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint

import stquant
from stquant.optim.consumed import ConsumedGradient
from stquant.policy.budget import Adaptive, Budget, Tolerance
from tests.cases import NON_NEGATIVE, RECIPES, SIGNED, name
from tests.optim.helpers import POLICIES, SHAPES, gradients, parameters, same, snapshot
from tests.tolerances import HALF_ULP

STEPS = 3


class Given(nn.Module):
    """A model whose parameters get exactly the gradients that it is called with."""

    def __init__(self, dtype: torch.dtype = torch.float32, shapes: Sequence[tuple[int, ...]] = SHAPES) -> None:
        super().__init__()
        self.weights = nn.ParameterList(parameters(shapes, dtype))

    def forward(self, grads: Sequence[torch.Tensor]) -> torch.Tensor:
        terms = [(p * g).sum() for p, g in zip(self.weights, grads, strict=True)]
        return torch.stack([term.float() for term in terms]).sum()


def train(
    model: Given, optimizer: Any, accumulation: int = 1, released: bool = True, **options: Any
) -> list[torch.Tensor]:
    """Train for a few steps; return all bits of weights and states."""
    params = list(model.weights)
    batches = list(gradients(params, STEPS * accumulation))
    release = stquant.release_gradients(model, optimizer, **options) if released else None
    for start in range(0, len(batches), accumulation):
        *first, last = batches[start : start + accumulation]
        if release is None:
            for batch in first:
                model(batch).backward()
        else:
            with release.accumulate():
                for batch in first:
                    model(batch).backward()
            assert all((p.grad is None) == (not first) for p in params)
        model(last).backward()
        assert all(isinstance(p.grad, ConsumedGradient) == released for p in params)
        optimizer.step()
        optimizer.zero_grad()
    return snapshot(optimizer, params)


def check(make: Callable[..., Any], dtype: torch.dtype, accumulation: int) -> None:
    plain, model = Given(dtype), Given(dtype)
    normal = train(plain, make(plain.parameters()), accumulation, released=False)
    assert same(train(model, make(model.parameters()), accumulation), normal)


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
def test_the_bits_are_those_of_the_normal_step(policy: Any, dtype: torch.dtype, accumulation: int) -> None:
    check(lambda p: stquant.AdamW(p, lr=1e-2, policy=policy), dtype, accumulation)


OTHERS = {
    "Adam": lambda p: stquant.Adam(p, lr=1e-2, weight_decay=0.1),
    "amsgrad": lambda p: stquant.AdamW(p, lr=1e-2, amsgrad=True, policy="fp32"),
    "SGD": lambda p: stquant.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "SGD without momentum": lambda p: stquant.SGD(p, lr=1e-2),
    "Lion": lambda p: stquant.Lion(p, lr=1e-3),
    "reference": lambda p: stquant.AdamW(p, lr=1e-2, backend="reference"),
    "4-bit residual": lambda p: stquant.AdamW(p, lr=1e-2, master_bits=4),
    "stochastic": lambda p: stquant.AdamW(p, lr=1e-2, master_bits=0),
}


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS.keys())
def test_of_every_optimizer_too(make: Callable[..., Any], dtype: torch.dtype, accumulation: int) -> None:
    check(make, dtype, accumulation)


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("format", [*SIGNED, *NON_NEGATIVE, *RECIPES], ids=name)
def test_and_of_every_format(format: Any, accumulation: int) -> None:
    state = "exp_avg" if format.signed else "exp_avg_sq"
    policy = stquant.Fixed(**{state: format.name}, block=format.block)
    check(lambda p: stquant.AdamW(p, lr=1e-2, policy=policy), torch.bfloat16, accumulation)


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("policy", [Adaptive(every=1), Budget(bits=5.0, every=2), Tolerance(0.01, every=1)], ids=repr)
def test_adaptive_policies_measure_and_decide_alike(policy: Any, dtype: torch.dtype, accumulation: int) -> None:
    """Measured in the hooks, decided in `step()`."""
    decided = []

    def make(params: Any) -> Any:
        optimizer = stquant.AdamW(params, lr=1e-2, policy=policy)
        optimizer.register_step_post_hook(lambda *_: decided.append(dict(optimizer._controller.decisions)))
        return optimizer

    check(make, dtype, accumulation)
    plain, released = decided[:STEPS], decided[STEPS:]
    assert plain == released
    assert any(state.old != state.new for decisions in plain for d in decisions.values() for state in d.states)


def test_groups_keep_their_own_options() -> None:
    def make(params: Any) -> Any:
        first, *rest = params
        head = {"params": [first], "policy": "fp32", "lr": 0.5}
        return stquant.AdamW([head, {"params": rest, "weight_decay": 0.3}], lr=1e-2)

    check(make, torch.float32, 1)


class Tied(nn.Module):
    """An embedding that is also the head, and a layer that is used three times."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(64, 96)
        self.layer = nn.Linear(96, 96)
        self.head = nn.Linear(96, 64, bias=False)
        self.head.weight = self.embedding.weight
        self.reentrant = reentrant

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for _ in range(3):
            if self.reentrant is None:
                hidden = torch.tanh(self.layer(hidden))
            else:
                hidden = checkpoint(self.layer, hidden, use_reentrant=self.reentrant)
        logits: torch.Tensor = self.head(hidden)
        return nn.functional.cross_entropy(logits, tokens)


TOKENS = torch.arange(64).flip(0)


def network_steps(model: nn.Module, optimizer: Any, steps: int = 3, schedule: Any = None) -> list[torch.Tensor]:
    for _ in range(steps):
        model(TOKENS).backward()
        optimizer.step()
        optimizer.zero_grad()
        if schedule:
            schedule.step()
    return snapshot(optimizer, list(model.parameters()))


@pytest.mark.parametrize("reentrant", [None, False])
def test_tied_and_reused_weights_step_once(reentrant: bool | None) -> None:
    plain, model = Tied(reentrant), Tied(reentrant)
    optimizer = stquant.AdamW(model.named_parameters(), lr=1e-2)
    stquant.release_gradients(model, optimizer)
    normal = network_steps(plain, stquant.AdamW(plain.named_parameters(), lr=1e-2))
    assert same(network_steps(model, optimizer), normal)


def test_reentrant_checkpointing_raises() -> None:
    """It runs a backward of its own for each segment, so a reused weight gets its gradient in parts."""
    model = Tied(reentrant=True)
    stquant.release_gradients(model, stquant.AdamW(model.named_parameters(), lr=1e-2))
    with pytest.raises(RuntimeError, match=r"second gradient arrived for parameter 'layer\..*use_reentrant=False"):
        model(TOKENS).backward()


@pytest.mark.parametrize("zero", [False, True])
def test_micro_batches_that_are_not_announced_raise(zero: bool) -> None:
    """Without `accumulate` each micro-batch would be a step of its own."""
    model = Given()
    optimizer = stquant.AdamW(model.parameters(), lr=1e-2)
    stquant.release_gradients(model, optimizer)
    first, second = gradients(list(model.weights), 2)
    model(first).backward()
    if zero:
        optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"second gradient arrived.*release\.accumulate"):
        model(second).backward()


USES = {
    "norm": (lambda p: nn.utils.clip_grad_norm_(p, 1.0), "norm.* needs the gradient of .*clip_previous_norm"),
    "value": (lambda p: nn.utils.clip_grad_value_(p, 1.0), "clamp.* needs the gradient of parameter"),
    "total": (lambda p: nn.utils.get_total_norm([q.grad for q in p]), "norm.* needs the gradient of parameter"),
    "arithmetic": (lambda p: p[0].grad * 2, "mul.* needs the gradient of parameter 'group 0 / 0'"),
}


@pytest.mark.parametrize(("use", "message"), USES.values(), ids=USES.keys())
def test_clipping_after_backward_raises(use: Callable[..., Any], message: str) -> None:
    """It would see no gradients, return a norm of zero and clip nothing."""
    model = Given()
    optimizer = stquant.AdamW(model.parameters(), lr=1e-2)
    stquant.release_gradients(model, optimizer)
    model(next(gradients(list(model.weights), 1))).backward()
    with pytest.raises(RuntimeError, match=message):
        use(list(model.parameters()))
    assert "ConsumedGradient('group 0 / 0', shape=(64, 128)" in repr(model.weights[0].grad)


def test_a_scaler_raises() -> None:
    model = Given()
    optimizer = stquant.AdamW(model.parameters(), lr=1e-2)
    stquant.release_gradients(model, optimizer)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(next(gradients(list(model.weights), 1)))).backward()
    with pytest.raises(RuntimeError, match=r"GradScaler finds no gradient of .*use bfloat16 without a scaler"):
        scaler.step(optimizer)


def test_autocast_that_needs_a_scaler_raises_before_anything_changes() -> None:
    model = Tied()
    optimizer = stquant.AdamW(model.named_parameters(), lr=1e-2)
    stquant.release_gradients(model, optimizer)
    with torch.autocast("cpu", torch.float16), pytest.raises(RuntimeError, match="float16 needs a GradScaler"):
        model(TOKENS)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(TOKENS)
    loss.backward()
    optimizer.step()


@pytest.fixture
def process_group() -> Any:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_classic_data_parallel_is_refused() -> None:
    """Its average comes after the hooks: each replica would step with its own gradient."""
    inner = nn.Linear(96, 64)
    wrapped = nn.parallel.DistributedDataParallel(inner)
    for model, path in ((wrapped, "the model"), (nn.Sequential(wrapped), "0")):
        with pytest.raises(ValueError, match=f"{path} is DistributedDataParallel, which averages .*fully_shard"):
            stquant.release_gradients(model, stquant.AdamW(model.parameters()))
    optimizer = stquant.AdamW(inner.parameters())
    stquant.release_gradients(inner, optimizer)
    with pytest.raises(ValueError, match="around the model is DistributedDataParallel"):
        wrapped(torch.ones(2, 96))
    assert not optimizer.state


def test_what_cannot_be_released_is_refused() -> None:
    model, other = nn.Linear(96, 64), nn.Linear(96, 64)
    optimizer = stquant.AdamW(model.named_parameters())
    with pytest.raises(ValueError, match="parameter 'weight' of the optimizer is not one of the model"):
        stquant.release_gradients(other, optimizer)
    with pytest.raises(TypeError, match="optimizer is AdamW; allowed are stquant's"):
        stquant.release_gradients(model, torch.optim.AdamW(model.parameters()))  # type: ignore[arg-type]
    for limits in ({"clip_tensor_norm": 0.0}, {"clip_previous_norm": -1.0}, {"clip_tensor_norm": float("nan")}):
        with pytest.raises(ValueError, match="is out of range; allowed is a positive number"):
            stquant.release_gradients(model, optimizer, **limits)
    with pytest.raises(ValueError, match="exclude each other"):
        stquant.release_gradients(model, optimizer, clip_tensor_norm=1.0, clip_previous_norm=1.0)
    with (
        stquant.release_gradients(model, optimizer),
        pytest.raises(RuntimeError, match="released already; remove"),
    ):
        stquant.release_gradients(model, optimizer)
    stquant.release_gradients(model, optimizer)


def test_clipping_of_each_tensor_is_that_of_torch() -> None:
    plain, model = Given(), Given()
    normal, released = (stquant.AdamW(m.parameters(), lr=1e-2) for m in (plain, model))
    for grads in gradients(list(plain.weights), STEPS):
        plain(grads).backward()
        for p in plain.parameters():
            nn.utils.clip_grad_norm_([p], 0.5)
        normal.step()
        normal.zero_grad()
    expected = snapshot(normal, list(plain.weights))
    assert same(train(model, released, clip_tensor_norm=0.5), expected)


def test_clipping_by_the_previous_norm_and_its_resumption() -> None:
    plain, model = Given(), Given()
    normal, optimizer = (stquant.AdamW(m.parameters(), lr=1e-2) for m in (plain, model))
    release = stquant.release_gradients(model, optimizer, clip_previous_norm=5.0)
    batches = list(gradients(list(plain.weights), 4))
    previous = None
    for step, grads in enumerate(batches):
        if step == 2:
            file = optimizer.state_dict(), release.state_dict()
            release.remove()
            optimizer = stquant.AdamW(model.parameters())
            release = stquant.release_gradients(model, optimizer, clip_previous_norm=5.0)
            optimizer.load_state_dict(file[0])
            release.load_state_dict(file[1])
        plain(grads).backward()
        norms = [torch.linalg.vector_norm(p.grad) for p in reversed(plain.weights)]  # type: ignore[arg-type]
        if previous is not None:
            nn.utils.clip_grads_with_norm_(plain.parameters(), 5.0, previous)
        previous = torch.linalg.vector_norm(torch.stack(norms))
        normal.step()
        normal.zero_grad()
        model(grads).backward()
        optimizer.step()
        assert release.norm == previous
        assert same(snapshot(optimizer, list(model.weights)), snapshot(normal, list(plain.weights)))
    assert float(previous) > 5.0  # type: ignore[arg-type]  # or nothing was clipped


def test_a_norm_that_is_not_finite_does_not_clip_the_next_step() -> None:
    model = Given(shapes=[(64, 128)])
    optimizer = stquant.SGD(model.parameters(), lr=1.0)
    release = stquant.release_gradients(model, optimizer, clip_previous_norm=1.0)
    for size in (1e30, 2.0):
        before = model.weights[0].detach().clone()
        model([torch.full((64, 128), size)]).backward()
        optimizer.step()
    assert torch.equal(model.weights[0], before - 2.0)
    # Blocked summation of 8,192 equal squares keeps the sum within a few roundings.
    assert float(release.norm) == pytest.approx(2.0 * (64 * 128) ** 0.5, rel=16 * HALF_ULP)  # type: ignore[arg-type]


def test_schedulers_compose() -> None:
    model, plain = Tied(), Tied()
    outcomes = []
    for net in (model, plain):
        optimizer = stquant.AdamW(net.named_parameters(), lr=torch.tensor(1e-2))
        if net is model:
            stquant.release_gradients(net, optimizer)
        schedule = lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=10, cycle_momentum=True)
        outcomes.append(network_steps(net, optimizer, 6, schedule))
    assert same(*outcomes)


@pytest.mark.parametrize("rate", [1e-2, torch.tensor(1e-2)])
def test_a_rate_that_changes_between_backward_and_step_raises(rate: Any) -> None:
    model = Given()
    optimizer = stquant.AdamW(model.parameters(), lr=rate)
    stquant.release_gradients(model, optimizer)
    schedule = lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    model(next(gradients(list(model.weights), 1))).backward()
    schedule.optimizer._opt_called = True  # torch warns of the wrong order, too
    schedule.step()
    with pytest.raises(RuntimeError, match="changed between backward and step"):
        optimizer.step()


def test_step_handles_what_is_left() -> None:
    """Gradients of micro-batches whose parameter the last one does not use, or that were set by hand."""
    plain, model = Given(), Given()
    normal, optimizer = (stquant.AdamW(m.parameters(), lr=1e-2) for m in (plain, model))
    release = stquant.release_gradients(model, optimizer)
    first, second = gradients(list(plain.weights), 2)
    for net in (plain, model):
        with release.accumulate():
            net(first).backward()
        (net.weights[0] * second[0]).sum().backward()
    assert [isinstance(p.grad, ConsumedGradient) for p in model.weights] == [True] + 5 * [False]
    normal.step()
    optimizer.step()
    assert same(snapshot(optimizer, list(model.weights)), snapshot(normal, list(plain.weights)))
    assert model.weights[0].grad is None
    model.zero_grad()
    model(first).backward()
    model.weights[0].grad = torch.ones_like(model.weights[0])
    with pytest.raises(RuntimeError, match="second gradient arrived for parameter 'group 0 / 0'"):
        optimizer.step()


@pytest.mark.parametrize("accumulate", [False, True])
def test_closures_work_and_left_gradients_are_clipped(accumulate: bool) -> None:
    plain, model = Given(), Given()
    normal, optimizer = (stquant.AdamW(m.parameters(), lr=1e-2) for m in (plain, model))
    release = stquant.release_gradients(model, optimizer, clip_tensor_norm=0.5)
    (grads,) = gradients(list(plain.weights), 1)

    def closure() -> torch.Tensor:
        with release.accumulate() if accumulate else contextlib.nullcontext():
            loss = model(grads)
            loss.backward()
        return loss.detach()

    loss = plain(grads)
    loss.backward()
    for p in plain.parameters():
        nn.utils.clip_grad_norm_([p], 0.5)
    normal.step()
    assert torch.equal(optimizer.step(closure), loss)
    assert same(snapshot(optimizer, list(model.weights)), snapshot(normal, list(plain.weights)))
    assert all((p.grad is None) != accumulate for p in model.weights)


def test_a_copy_is_not_released() -> None:
    model = Tied()
    optimizer = stquant.AdamW(model.named_parameters(), lr=1e-2)
    stquant.release_gradients(model, optimizer)
    network_steps(model, optimizer, 1)
    twin, copied = copy.deepcopy((model, optimizer))
    twin(TOKENS).backward()
    assert not any(isinstance(p.grad, ConsumedGradient) for p in twin.parameters())
    copied.step()
    assert same(network_steps(model, optimizer, 1), snapshot(copied, list(twin.parameters())))


def test_accumulation_may_not_begin_after_a_step_began() -> None:
    model = Given()
    release = stquant.release_gradients(model, stquant.AdamW(model.parameters(), lr=1e-2))
    model(next(gradients(list(model.weights), 1))).backward()
    with pytest.raises(RuntimeError, match=r"call optimizer\.step"), release.accumulate():
        pass


def test_frozen_added_and_replaced_parameters() -> None:
    model = nn.ModuleDict({"a": nn.Linear(96, 64), "b": nn.Linear(96, 64), "c": nn.Linear(96, 64)})
    model["b"].requires_grad_(False)
    model.forward = lambda x: sum(layer(x).square().mean() for layer in model.values())  # type: ignore[assignment]
    optimizer = stquant.AdamW([*model["a"].parameters(), *model["b"].parameters()], lr=1e-2)
    stquant.release_gradients(model, optimizer)

    def consumed() -> list[bool]:
        model(torch.ones(2, 96)).backward()
        found = [isinstance(model[key].weight.grad, ConsumedGradient) for key in "abc"]
        optimizer.step()
        model.zero_grad()
        return found

    assert consumed() == [True, False, False]
    model["b"].requires_grad_(True)
    optimizer.add_param_group({"params": list(model["c"].parameters())})
    assert consumed() == [True, True, True]
    old = model["a"].weight
    model["a"].weight = nn.Parameter(old.detach().clone())
    optimizer.param_groups[0]["params"][0] = model["a"].weight
    assert consumed() == [True, True, True]
    old.sum().backward()
    assert not isinstance(old.grad, ConsumedGradient)


def test_a_load_between_steps_is_followed() -> None:
    plain, model = Given(), Given()
    normal, optimizer = (stquant.AdamW(m.parameters(), lr=1e-2) for m in (plain, model))
    stquant.release_gradients(model, optimizer)
    for grads in gradients(list(plain.weights), STEPS):
        for net, opt in ((plain, normal), (model, optimizer)):
            net(grads).backward()
            opt.step()
            opt.zero_grad()
            opt.load_state_dict(opt.state_dict())
    assert same(snapshot(optimizer, list(model.weights)), snapshot(normal, list(plain.weights)))


def test_after_removal_gradients_stay() -> None:
    model = Given()
    optimizer = stquant.AdamW(model.parameters(), lr=1e-2)
    batches = gradients(list(model.weights), 2)
    with stquant.release_gradients(model, optimizer):
        model(next(batches)).backward()
    assert all(p.grad is None for p in model.weights)
    grads = next(batches)
    model(grads).backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.weights, grads, strict=True))  # type: ignore[arg-type]
    optimizer.step()


def test_a_graph_that_still_needs_the_old_weight_raises() -> None:
    """The detached copy is saved for a node that may run after the weight has stepped."""
    weight = nn.Parameter(torch.randn(64, 128))
    model = nn.ParameterList([weight])
    optimizer = stquant.AdamW(model.parameters(), lr=1e-2)
    stquant.release_gradients(model, optimizer)
    inputs = torch.randn(4, 64, requires_grad=True)
    early = inputs @ weight.detach()
    loss = early.sum() + (weight * 2).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_sparse_gradients_raise() -> None:
    model = nn.Embedding(64, 96, sparse=True)
    stquant.release_gradients(model, stquant.AdamW(model.parameters()))
    with pytest.raises(RuntimeError, match=r"layout torch\.sparse_coo, allowed is a dense one"):
        model(TOKENS).sum().backward()


def test_a_step_without_gradients_changes_nothing() -> None:
    model = Given()
    optimizer = stquant.AdamW(model.parameters(), lr=0.0)
    stquant.release_gradients(model, optimizer)
    before = [p.detach().clone() for p in model.weights]
    optimizer.step()
    for p in model.weights:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert all(torch.equal(p, b) for p, b in zip(model.weights, before, strict=True))


def test_compiled_models_are_released_too() -> None:
    plain, model = Tied(), Tied()
    optimizer = stquant.AdamW(model.named_parameters(), lr=1e-2)
    stquant.release_gradients(model, optimizer)
    compiled = torch.compile(model, backend="eager")
    normal = network_steps(plain, stquant.AdamW(plain.named_parameters(), lr=1e-2), 2)
    assert same(network_steps(compiled, optimizer, 2), normal)
