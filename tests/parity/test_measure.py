"""What the compiled kernels measure before a step equals the reference to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from stquant.codecs.blocks import Box, Grid
from stquant.kernels import cpu, reference
from stquant.kernels.ops import AdamRule, Candidates, Item, LionRule, Rule, SGDRule
from stquant.storage.packed import PackedState
from tests.cases import NON_NEGATIVE, SIGNED
from tests.parity import helpers
from tests.parity.helpers import ADAMW, Case

pytestmark = pytest.mark.skipif(cpu.REASON is not None, reason="the compiled kernels are not installed")

SGD = SGDRule(lr=0.1, momentum=0.9, dampening=0.3, weight_decay=1e-2, nesterov=True, maximize=True, seed=3)
LION = LionRule(lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1, maximize=False, seed=3)
RULES: dict[str, Rule] = {
    "adamw": ADAMW,
    "adam, maximize": replace(ADAMW, decoupled=False, maximize=True),
    "sgd": SGD,
    "sgd, plain": replace(SGD, nesterov=False, weight_decay=0.0),
    "lion": LION,
}
STEPS = {AdamRule: reference.adam_step_, SGDRule: reference.sgd_step_, LionRule: reference.lion_step_}
CANDIDATES: dict[type, Candidates] = {
    AdamRule: {"exp_avg": SIGNED, "exp_avg_sq": NON_NEGATIVE},
    SGDRule: {"momentum_buffer": SIGNED},
    LionRule: {"exp_avg": SIGNED},
}
SHAPES = ((3, 33), (40, 128), (3, 257), (5, 1000), (2, 4097), (8, 3, 16, 16), (1, 9000), (0, 64))


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    yield
    cpu.use("")


def cases(rule: Rule, dtype: torch.dtype) -> list[Case]:
    """Each signed format with a non-negative one in turn, over the shapes and blocks."""
    found = []
    for i in range(max(len(SIGNED), len(NON_NEGATIVE))):
        formats = [ladder[i % len(ladder)].name for ladder in CANDIDATES[type(rule)].values()]
        found.append(
            Case(
                dict(zip(CANDIDATES[type(rule)], formats, strict=True)),
                SHAPES[i % len(SHAPES)],
                dtype,
                dtype,
                block=(128, 32, 512)[i % 3],
                residual=4 if dtype is torch.bfloat16 and i % 2 else 0,
                non_finite=i % 3 == 1,
            )
        )
    return found


def blocks_of(candidates: Candidates, block: int) -> Candidates:
    return {name: [format.with_block(block) for format in ladder] for name, ladder in candidates.items()}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_energies(rule: Rule, dtype: torch.dtype) -> None:
    wanted = CANDIDATES[type(rule)]
    table = cases(rule, dtype)
    for steps in (1, 2, 5):
        items = helpers.run(STEPS[type(rule)], table, rule, steps)
        for block in (32, 128, 512):
            part = [item for item, case in zip(items, table, strict=True) if case.block == block]
            candidates = blocks_of(wanted, block)
            assert all(cpu.why_not_measured(item, candidates) is None for item in part)
            truth = reference.measure(part, rule, candidates)
            for isa in cpu.instruction_sets():
                cpu.use(isa)
                assert torch.equal(cpu.measure(part, rule, candidates), truth), isa


def test_threads_and_company_do_not_matter() -> None:
    items = helpers.run(reference.adam_step_, cases(ADAMW, torch.float32), ADAMW, 3)
    items = [item for item in items if item.states["exp_avg"].format.block == 128]  # type: ignore[union-attr]
    turned = replace(items[1], param=items[1].param.t().contiguous().t(), grad=items[1].grad.t().contiguous().t())
    mixed: list[Item] = [items[0], turned, *items[1:]]
    candidates = CANDIDATES[AdamRule]
    assert cpu.why_not_measured(turned, candidates) == "a tensor is not contiguous"
    before = torch.get_num_threads()
    truth = reference.measure(mixed, ADAMW, candidates)
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            assert torch.equal(cpu.measure(mixed, ADAMW, candidates), truth)
    finally:
        torch.set_num_threads(before)


def test_what_overflows_does_not_count() -> None:
    """A second moment that is zero under a gradient that is not makes a step beyond fp32."""
    [item] = helpers.run(reference.adam_step_, [Case({"exp_avg": "mulaw8", "exp_avg_sq": "log8"}, (4, 128))], ADAMW, 2)
    rule = replace(ADAMW, eps=0.0, lr=3e38)
    candidates = CANDIDATES[AdamRule]
    truth = reference.measure([item], rule, candidates)
    assert bool((truth >= 0).all())
    for isa in cpu.instruction_sets():
        cpu.use(isa)
        assert torch.equal(cpu.measure([item], rule, candidates), truth)


def test_a_sharded_part_is_measured_alike() -> None:
    """A box that holds some of the sampled rows, at places that lie a stride apart."""
    whole, half = (60, 160), (30, 160)
    generator = torch.Generator().manual_seed(0)
    for start in ((0, 0), (30, 0)):
        grid = Grid.of(whole, 128, Box(whole, start, half))
        states = {
            name: PackedState.zeros(format, grid)
            for name, format in (("exp_avg", SIGNED[-1]), ("exp_avg_sq", NON_NEGATIVE[3]))
        }
        grad = torch.randn(half, generator=generator)
        item = Item(torch.randn(half, generator=generator), grad, states, None, False, 7, 1, grid.box)
        reference.adam_step_([replace(item, step=6)], ADAMW)
        candidates = CANDIDATES[AdamRule]
        assert cpu.why_not_measured(item, candidates) is None
        assert torch.equal(cpu.measure([item], ADAMW, candidates), reference.measure([item], ADAMW, candidates))
