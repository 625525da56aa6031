"""The database of optimizer inputs that torch tests its own optimizers with, run on ours.

Every accepted configuration must train as torch's optimizer does with unpacked states, and train
with packed ones; every configuration that torch refuses must be refused with the same type of error.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.testing._internal.common_optimizers import optim_db

import stquant
from tests.tolerances import ULP

OURS: dict[type[torch.optim.Optimizer], Callable[..., Any]] = {
    torch.optim.AdamW: stquant.AdamW,
    torch.optim.Adam: stquant.Adam,
    torch.optim.SGD: stquant.SGD,
}
ENTRIES = {info.optim_cls: info for info in optim_db if info.optim_cls in OURS}
INPUTS = [(kind, given) for kind, info in ENTRIES.items() for given in info.optim_inputs_func("cpu", torch.float32)]
ERRORS = [
    (kind, wrong) for kind, info in ENTRIES.items() for wrong in info.optim_error_inputs_func("cpu", torch.float32)
]
SCHEDULERS = [(kind, scheduler) for kind, info in ENTRIES.items() for scheduler in info.scheduler_inputs]
STEPS = 20
DRIFT = 64 * ULP
"""fp32 rounding of two orders of the same operations, relative to weights of about 1, over `STEPS`."""

MIXED_BETAS = "betas must be either both floats or both Tensors"
"""torch refuses it for its own implementations' sake; ours reads each as a number."""


def label(value: Any) -> str | None:
    """Name a case by optimizer and description."""
    if isinstance(value, type):
        return value.__name__
    return getattr(getattr(value, "optimizer_error_input", value), "desc", None)


def parameters() -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape)) for shape in ((16, 256), (256,), (3, 5))]


def train(optimizer: torch.optim.Optimizer, params: list[torch.nn.Parameter], schedulers: Any = ()) -> float:
    """Take steps towards zero, and return the sum of squares that is left."""
    made = [scheduler(optimizer) for scheduler in schedulers]
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = sum((param.square().sum() for param in params), torch.zeros(()))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        for scheduler in made:
            scheduler.step(*([1.0] if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) else []))
    return loss.item()


@pytest.mark.parametrize(("kind", "given"), INPUTS, ids=label)
def test_unpacked_states_follow_torch(kind: type[torch.optim.Optimizer], given: Any) -> None:
    theirs, ours = parameters(), parameters()
    options = copy.deepcopy(given.kwargs)
    train(kind(theirs, **options), theirs)
    train(OURS[kind](ours, policy="fp32", **options), ours)
    for a, b in zip(theirs, ours, strict=True):
        torch.testing.assert_close(b, a, rtol=DRIFT, atol=DRIFT)


@pytest.mark.parametrize(("kind", "given"), INPUTS, ids=label)
def test_packed_states_train_and_resume(kind: type[torch.optim.Optimizer], given: Any) -> None:
    params = parameters()
    start = sum(float(param.detach().square().sum()) for param in params)
    options = copy.deepcopy(given.kwargs)
    if options.get("amsgrad"):
        with pytest.raises(ValueError, match="amsgrad=True needs policy='fp32'"):
            OURS[kind](params, **options)
        return
    optimizer = OURS[kind](params, **options)
    end = train(optimizer, params)
    assert end > start if options.get("maximize") else end < start
    twins = copy.deepcopy(params)
    other = OURS[kind](twins, **copy.deepcopy(given.kwargs))
    other.load_state_dict(optimizer.state_dict())
    train(optimizer, params)
    train(other, twins)
    assert all(torch.equal(a, b) for a, b in zip(params, twins, strict=True))


@pytest.mark.parametrize(("kind", "scheduler"), SCHEDULERS, ids=label)
def test_schedulers_of_the_database(kind: type[torch.optim.Optimizer], scheduler: Any) -> None:
    theirs, ours = parameters(), parameters()
    train(kind(theirs, lr=0.01), theirs, scheduler)
    train(OURS[kind](ours, lr=0.01, policy="fp32"), ours, scheduler)
    for a, b in zip(theirs, ours, strict=True):
        torch.testing.assert_close(b, a, rtol=DRIFT, atol=DRIFT)


@pytest.mark.parametrize(("kind", "wrong"), ERRORS, ids=label)
def test_what_torch_refuses_is_refused(kind: type[torch.optim.Optimizer], wrong: Any) -> None:
    given = wrong.optimizer_error_input
    params = given.params if given.params is not None else parameters()
    if issubclass(wrong.error_type, Warning):
        with pytest.warns(wrong.error_type, match=wrong.error_regex):
            OURS[kind](params, **given.kwargs)
    elif given.desc == MIXED_BETAS:
        OURS[kind](params, **given.kwargs)
    else:
        with pytest.raises(wrong.error_type):
            OURS[kind](params, **given.kwargs)
