"""One list of what users of torch.optim rely on, run on torch's optimizers and on ours alike."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

import stquant

Make = Callable[..., torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "torch AdamW": lambda p, **k: torch.optim.AdamW(p, **{"lr": 1e-2, **k}),
    "torch SGD": lambda p, **k: torch.optim.SGD(p, **{"lr": 1e-2, "momentum": 0.9, **k}),
    "AdamW": lambda p, **k: stquant.AdamW(p, **{"lr": 1e-2, **k}),
    "AdamW fp32": lambda p, **k: stquant.AdamW(p, **{"lr": 1e-2, "policy": "fp32", **k}),
    "AdamW 4": lambda p, **k: stquant.AdamW(p, **{"lr": 1e-2, "policy": stquant.Fixed(bits=4), **k}),
    "Adam": lambda p, **k: stquant.Adam(p, **{"lr": 1e-2, **k}),
    "SGD": lambda p, **k: stquant.SGD(p, **{"lr": 1e-2, "momentum": 0.9, **k}),
    "Lion": lambda p, **k: stquant.Lion(p, **{"lr": 1e-3, **k}),
}

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, [lambda s: 0.9**s] * len(o.param_groups)),
    "multiplicative": lambda o: lr_scheduler.MultiplicativeLR(o, lambda s: 0.9),
    "step": lambda o: lr_scheduler.StepLR(o, 2),
    "multi step": lambda o: lr_scheduler.MultiStepLR(o, [2, 4]),
    "constant": lambda o: lr_scheduler.ConstantLR(o, 0.5, 3),
    "linear": lambda o: lr_scheduler.LinearLR(o, 0.5, total_iters=3),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "polynomial": lambda o: lr_scheduler.PolynomialLR(o, 5),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 1e-4, 1e-2, 3, cycle_momentum=False),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 1e-2, total_steps=8),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)], milestones=[2]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
}


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(96, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64))


def backward(model: torch.nn.Module, seed: int = 0) -> torch.Tensor:
    data = torch.randn(16, 96, generator=torch.Generator().manual_seed(seed))
    loss: torch.Tensor = model(data).square().mean()
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3, seed: int = 0) -> float:
    for step in range(steps):
        optimizer.zero_grad()
        loss = backward(model, seed + step)
        optimizer.step()
    return float(loss)


def weights(model: torch.nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.fixture(params=OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def make(request: pytest.FixtureRequest) -> Make:
    found: Make = request.param
    return found


def test_it_trains(make: Make) -> None:
    model = network()
    optimizer = make(model.parameters())
    first = train(model, optimizer, 1)
    assert train(model, optimizer, 30) < 0.75 * first


@pytest.mark.parametrize("scheduler", SCHEDULERS.values(), ids=SCHEDULERS.keys())
def test_every_scheduler_sets_each_groups_own_rate(make: Make, scheduler: Callable[..., Any]) -> None:
    model = network()
    first, *rest = model.parameters()
    optimizer = make([{"params": [first], "lr": 5e-3}, {"params": rest}])
    twin = torch.optim.SGD([{"params": [torch.zeros(1)], "lr": 5e-3}, {"params": [torch.zeros(1)], "lr": 1e-2}])
    if any(group["lr"] == 1e-3 for group in optimizer.param_groups):
        twin.param_groups[1]["lr"] = 1e-3
    schedule, expected = scheduler(optimizer), scheduler(twin)
    for _ in range(6):
        train(model, optimizer, 1)
        twin.step()
        arguments = [1.0] if isinstance(schedule, lr_scheduler.ReduceLROnPlateau) else []
        schedule.step(*arguments)
        expected.step(*arguments)
        assert [g["lr"] for g in optimizer.param_groups] == [g["lr"] for g in twin.param_groups]


def test_a_group_with_rate_zero_stands_still(make: Make) -> None:
    model = network()
    first, *rest = model.parameters()
    optimizer = make([{"params": [first], "lr": 0.0}, {"params": rest}])
    before = weights(model)
    train(model, optimizer)
    after = weights(model)
    assert torch.equal(before[0], after[0])
    assert not torch.equal(before[2], after[2])


def test_a_rate_that_a_scheduler_assigned_is_the_one_that_counts(make: Make) -> None:
    model = network()
    optimizer = make(model.parameters())
    schedule = lr_scheduler.LambdaLR(optimizer, lambda step: float(step != 2))
    for still in (False, False, True, False):
        before = weights(model)
        train(model, optimizer, 1)
        schedule.step()
        assert equal(before, weights(model)) == still


def test_a_tensor_rate_is_read_at_each_step(make: Make) -> None:
    model = network()
    rate = torch.tensor(1e-2)
    optimizer = make(model.parameters(), lr=rate)
    train(model, optimizer, 1)
    rate.zero_()
    before = weights(model)
    train(model, optimizer, 1)
    assert equal(before, weights(model))


def test_a_scaler_skips_steps_with_infinite_gradients(make: Make) -> None:
    model = network()
    optimizer = make(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step, spoiled in enumerate((False, True, False)):
        optimizer.zero_grad()
        data = torch.randn(16, 96, generator=torch.Generator().manual_seed(step))
        scaler.scale(model(data).square().mean()).backward()
        if spoiled:
            model[0].weight.grad[0, 0] = float("inf")  # type: ignore[index, union-attr]
        before, states = weights(model), copy.deepcopy(optimizer.state_dict())
        scaler.step(optimizer)
        scaler.update()
        assert equal(before, weights(model)) == spoiled
        assert (str(states) == str(optimizer.state_dict())) == spoiled
    assert scaler.get_scale() == 512.0


def test_clipping_works_before_the_step(make: Make) -> None:
    model = network()
    optimizer = make(model.parameters())
    backward(model)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    clipped = [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]
    optimizer.step()
    assert equal(clipped, [p.grad for p in model.parameters()])  # type: ignore[misc]


def test_groups_can_be_added_during_training(make: Make) -> None:
    model = network()
    first, *rest = model.parameters()
    optimizer = make([first])
    train(model, optimizer)
    optimizer.add_param_group({"params": rest, "lr": 1e-3})
    before = weights(model)
    train(model, optimizer)
    assert not any(torch.equal(a, b) for a, b in zip(before, weights(model), strict=True))


def test_hooks_run_around_a_step(make: Make) -> None:
    model = network()
    optimizer = make(model.parameters())
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    train(model, optimizer, 2)
    assert seen == ["before", "after"] * 2


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_continues_alike(make: Make, how: str) -> None:
    model = network()
    optimizer = make(model.parameters())
    train(model, optimizer)
    pair = (model, optimizer)
    other, twin = copy.deepcopy(pair) if how == "deepcopy" else pickle.loads(pickle.dumps(pair))
    train(model, optimizer, seed=9)
    train(other, twin, seed=9)
    assert equal(weights(model), weights(other))


def test_a_safe_load_continues_alike(make: Make) -> None:
    model = network()
    optimizer = make(model.parameters())
    train(model, optimizer)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other = network()
    other.load_state_dict(saved["model"])
    twin = make(other.parameters(), lr=0.5)
    twin.load_state_dict(saved["optimizer"])
    train(model, optimizer, seed=9)
    train(other, twin, seed=9)
    assert equal(weights(model), weights(other))


def test_a_state_dict_of_another_shape_raises(make: Make) -> None:
    model = network()
    saved = make(model.parameters()).state_dict()
    with pytest.raises(ValueError, match="group"):
        make(list(model.parameters())[:1]).load_state_dict(saved)


def test_empty_optimizers_load_their_own_state(make: Make) -> None:
    model = network()
    optimizer = make(model.parameters())
    optimizer.load_state_dict(optimizer.state_dict())
    train(model, optimizer)


def test_empty_groups_are_allowed(make: Make) -> None:
    model = network()
    optimizer = make([{"params": list(model.parameters())}, {"params": []}])
    train(model, optimizer)
    optimizer.load_state_dict(optimizer.state_dict())


def test_names_are_kept(make: Make) -> None:
    model = network()
    optimizer = make(model.named_parameters())
    assert optimizer.param_groups[0]["param_names"] == [name for name, _ in model.named_parameters()]
    assert optimizer.state_dict()["param_groups"][0]["param_names"][0] == "0.weight"


def test_freezing_and_unfreezing(make: Make) -> None:
    model = network()
    optimizer = make(model.parameters())
    train(model, optimizer)
    model[0].requires_grad_(False)  # type: ignore[operator, index]
    before = weights(model)
    train(model, optimizer)
    assert equal(before[:2], weights(model)[:2])
    model[0].requires_grad_(True)  # type: ignore[operator, index]
    train(model, optimizer)
    assert not torch.equal(before[0], weights(model)[0])


def test_tied_weights_have_one_state(make: Make) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(96, 96), torch.nn.Linear(96, 96))
    model[1].weight = model[0].weight
    optimizer = make(model.parameters())
    train(model, optimizer)
    assert len(optimizer.state) == 3


def test_parameters_that_move_to_another_dtype_keep_their_state(make: Make) -> None:
    model = network()
    optimizer = make(model.parameters())
    train(model, optimizer)
    model.to(torch.float32)
    train(model, optimizer)
    assert len(optimizer.state) == 4


def test_zero_grad(make: Make) -> None:
    model = network()
    optimizer = make(model.parameters())
    backward(model)
    optimizer.zero_grad(set_to_none=False)
    assert all(not bool(p.grad.any()) for p in model.parameters())  # type: ignore[union-attr]
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    ("params", "error"),
    [
        (list, ValueError),
        (lambda: torch.zeros(2, 2), TypeError),
        (lambda: [torch.nn.Parameter(torch.zeros(1)), 3], TypeError),
        (lambda: {torch.nn.Parameter(torch.zeros(1))}, TypeError),
        (lambda: [torch.zeros(1, requires_grad=True) * 2], ValueError),
    ],
    ids=["empty", "tensor", "no tensor", "set", "non-leaf"],
)
def test_wrong_parameters_raise(make: Make, params: Callable[[], Any], error: type[Exception]) -> None:
    given = params()
    if isinstance(given, set):
        given = [{"params": given}]
    with pytest.raises(error):
        make(given)


def test_a_parameter_in_two_groups_raises(make: Make) -> None:
    param = torch.nn.Parameter(torch.zeros(64, 128))
    with pytest.raises(ValueError, match="more than one parameter group"):
        make([{"params": [param]}, {"params": [param]}])


def test_options_show_in_repr(make: Make) -> None:
    optimizer = make(network().parameters())
    assert repr(optimizer).startswith(type(optimizer).__name__ + " (\nParameter Group 0\n")
    assert "weight_decay" in repr(optimizer)
    assert max(map(len, repr(optimizer).splitlines())) < 100


def test_closures_may_run_the_model_again(make: Make) -> None:
    model = network()
    optimizer = make(model.parameters())

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        return backward(model)

    losses = [float(optimizer.step(closure)) for _ in range(5)]  # type: ignore[arg-type]
    assert losses == sorted(losses, reverse=True)


def test_parameters_swapped_in_place_before_the_first_step_are_trained(make: Make) -> None:
    """Wrappers replace the parameters of a group after construction."""
    model = network()
    optimizer = make(model.parameters())
    other = network()
    optimizer.param_groups[0]["params"] = list(other.parameters())
    before = weights(other)
    train(other, optimizer)
    assert not equal(before, weights(other))
    optimizer.load_state_dict(optimizer.state_dict())
