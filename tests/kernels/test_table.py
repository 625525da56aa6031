"""The table of records: kept while nothing changes, and every change is seen before the next step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import stquant
from stquant.codecs import catalog
from stquant.codecs.blocks import Grid
from stquant.kernels import cpu, records, reference
from stquant.kernels.ops import Item, Memo
from stquant.storage.packed import PackedState
from tests.parity import helpers
from tests.parity.helpers import ADAMW, Case

pytestmark = pytest.mark.skipif(cpu.REASON is not None, reason="the compiled kernels are not installed")

SHAPE = (3, 300)
PAIR = {"exp_avg": "dynamic2", "exp_avg_sq": "log1"}


def recoded(item: Item, **formats: str) -> Item:
    """Return the item with states in other formats; the mapping is another, the parameter the same."""
    changed = {name: item.states[name].recode(catalog.get(format)) for name, format in formats.items()}
    return replace(item, states={**item.states, **changed})


def moved(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same values elsewhere, `tensor` still alive in the caller's hands."""
    return tensor.clone()


def state_moved(item: Item, part: str) -> Item:
    """Move the codes or scales of a state that stays the same object."""
    for state in item.states.values():
        setattr(state, part, moved(getattr(state, part)))
    return item


def octaves_moved(item: Item) -> Item:
    state = item.states["exp_avg_sq"]
    state.octaves = state.octaves._replace(lo=state.octaves.lo - 1)
    return item


def plain(item: Item) -> Item:
    """Turn the packed momentum into a plain one, as `set_policy` can."""
    return replace(item, states={**item.states, "exp_avg": item.states["exp_avg"].decode()})


CHANGES: dict[str, Callable[[Item], Item]] = {
    "the parameter": lambda item: replace(item, param=moved(item.param)),
    "the parameter's dtype": lambda item: replace(item, param=item.param.bfloat16()),
    "the parameter's shape": lambda item: replace(
        item,
        param=item.param[:2].clone(),
        grad=item.grad[:2].clone(),
        states={
            name: PackedState.encoded(state.format, state.decode()[:2], Grid.of((2, 300), 128))
            for name, state in item.states.items()
        },
    ),
    "the parameter's strides": lambda item: replace(item, param=item.param.t().contiguous().t()),
    "the gradient": lambda item: replace(item, grad=moved(item.grad)),
    "the gradient's dtype": lambda item: replace(item, grad=item.grad.half()),
    "codes": lambda item: state_moved(item, "codes"),
    "scales": lambda item: state_moved(item, "scales"),
    "octaves": octaves_moved,
    "the format of one state": lambda item: recoded(item, exp_avg="dynamic3"),
    "the formats of both": lambda item: recoded(item, exp_avg="mulaw4", exp_avg_sq="log4-nearest"),
    "a state that is no longer packed": plain,
    "the noise id": lambda item: replace(item, noise_id=5),
    "stochastic rounding": lambda item: replace(item, param=item.param.bfloat16(), stochastic=True),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_change_between_two_steps_is_seen(change: Callable[[Item], Item]) -> None:
    torch.manual_seed(0)
    case = Case(PAIR, SHAPE)
    start = replace(case.item(), grad=case.gradients(1)[0])
    sides = []
    for step, memo in ((cpu.adam_step_, Memo()), (reference.adam_step_, None)):
        item = replace(copy.deepcopy(start), memo=memo)
        kept = []
        for number in range(1, 5):
            if number == 3:
                kept = [item, *helpers.tensors(item).values()]  # alive, so that no address comes back
                item = change(item)
            item = replace(item, step=number)
            step([item], ADAMW)
        sides.append(item)
        del kept
    helpers.assert_equal([sides[0]], [sides[1]], [case])


@pytest.mark.parametrize("changed", [replace(ADAMW, seed=8), replace(ADAMW, maximize=True), replace(ADAMW, lr=0.5)])
def test_a_changed_rule_is_seen(changed) -> None:
    torch.manual_seed(0)
    case = Case(PAIR, SHAPE)
    start = replace(case.item(), grad=case.gradients(1)[0])
    sides = []
    for step, memo in ((cpu.adam_step_, Memo()), (reference.adam_step_, None)):
        item = replace(copy.deepcopy(start), memo=memo)
        for number, rule in enumerate((ADAMW, ADAMW, changed, changed), start=1):
            item = replace(item, step=number)
            step([item], rule)
        sides.append(item)
    helpers.assert_equal([sides[0]], [sides[1]], [case])


def test_a_record_is_made_once(monkeypatch) -> None:
    """Steps of the optimizer make the head of a record once per parameter, and again for what moves."""
    made = []
    head = records.head
    monkeypatch.setattr(records, "head", lambda item, *rest: made.append(tuple(item.param.shape)) or head(item, *rest))
    params = [torch.nn.Parameter(torch.randn(size, 128)) for size in (1, 2, 3)]
    optimizer = stquant.AdamW(params, policy=stquant.Fixed(4), backend="cpu")
    for param in params:
        param.grad = torch.randn_like(param)
    for _ in range(4):
        optimizer.step()
    assert made == [(1, 128), (2, 128), (3, 128)]
    old = params[1].data
    params[1].data = old.clone()
    optimizer.step()
    assert made[3:] == [(2, 128)]


@pytest.mark.parametrize("to_none", [True, False])
def test_training_equals_the_reference(to_none: bool) -> None:
    """Gradients come and go, weights and states are replaced, formats change: the bits stay the reference's."""
    sides = []
    for backend in ("cpu", "reference"):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(130, 64), torch.nn.Linear(64, 3))
        optimizer = stquant.AdamW(
            model.parameters(), policy=stquant.Fixed(exp_avg="dynamic2", exp_avg_sq="log1"), backend=backend
        )
        for number in range(8):
            if number == 3:
                optimizer.set_policy(stquant.Fixed(4))
            if number == 5:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
                old = [param.data for param in model.parameters()]
                for param in model.parameters():
                    param.data = param.data.clone()
            if number == 6:
                for param in model.parameters():
                    param.requires_grad_(param.dim() > 1)
            optimizer.zero_grad(set_to_none=to_none)
            model(torch.randn(5, 130)).square().mean().backward()
            optimizer.step()
        del old
        sides.append([param.detach() for param in model.parameters()])
    for ours, truth in zip(*sides, strict=True):
        assert torch.equal(ours, truth)
