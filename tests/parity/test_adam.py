"""The AdamW step of the compiled kernels equals the reference to the bit, on every instruction set."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from stquant.codecs.blocks import Box, Grid
from stquant.kernels import cpu, reference
from stquant.kernels.ops import AdamRule, Item
from stquant.storage.packed import PackedState
from tests.cases import NON_NEGATIVE, SIGNED, name
from tests.parity import helpers
from tests.parity.helpers import ADAMW, Case

pytestmark = pytest.mark.skipif(cpu.REASON is not None, reason="the compiled kernels are not installed")

ROWS = (1, 31, 33, 127, 128, 129, 257, 1000, 4097)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DEFAULT = {"exp_avg": "dynamic2", "exp_avg_sq": "log1"}


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    cpu.use("")


def check(cases: list[Case], rule: AdamRule = ADAMW, steps: int = 10) -> None:
    truth = helpers.run(reference.adam_step_, cases, rule, steps)
    for isa in cpu.instruction_sets():
        cpu.use(isa)
        helpers.assert_equal(helpers.run(cpu.adam_step_, cases, rule, steps), truth, cases)


@pytest.mark.parametrize("first", [*SIGNED, None], ids=name)
def test_every_pair_of_formats(first) -> None:
    """Each pair with rows of another length, one in two with non-finite gradients."""
    seconds = [format.name for format in NON_NEGATIVE] + ["fp32"]
    exp_avg = "fp32" if first is None else first.name
    check(
        [
            Case({"exp_avg": exp_avg, "exp_avg_sq": second}, (3, ROWS[i % 9]), non_finite=i % 2 == 0)
            for i, second in enumerate(seconds)
        ]
    )


@pytest.mark.parametrize("row", ROWS)
def test_rows_and_blocks(row: int) -> None:
    check([Case(DEFAULT, (5, row), block=block) for block in (32, 64, 128, 256, 1024)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("grad_dtype", DTYPES, ids=str)
def test_dtypes(dtype: torch.dtype, grad_dtype: torch.dtype) -> None:
    pairs = (("dynamic2", "log2"), ("mulaw4", "log8"), ("fp32", "fp32"), ("fp32", "log4"), ("mulaw8", "fp32"))
    check(
        [
            Case({"exp_avg": m, "exp_avg_sq": v}, (4, row), dtype, grad_dtype, stochastic=stochastic, non_finite=True)
            for (m, v), row, stochastic in itertools.product(pairs, (129, 256), (False, True))
        ]
    )


@pytest.mark.parametrize("stochastic", [False, True])
def test_residuals(stochastic: bool) -> None:
    check(
        [
            Case({"exp_avg": m, "exp_avg_sq": v}, (3, row), torch.bfloat16, residual=bits, stochastic=stochastic)
            for bits, (m, v), row in itertools.product(
                (*range(1, 9), 16), (("dynamic3", "log3"), ("fp32", "fp32")), (128, 257)
            )
        ]
    )


RULES = {
    "adam": replace(ADAMW, decoupled=False),
    "adam without decay": replace(ADAMW, decoupled=False, weight_decay=0.0),
    "maximize": replace(ADAMW, maximize=True),
    "maximize, coupled": replace(ADAMW, maximize=True, decoupled=False),
    "no momentum": replace(ADAMW, betas=(0.0, 0.95)),
    "large steps": replace(ADAMW, lr=0.5, eps=1e-3),
    "no eps": replace(ADAMW, eps=0.0),
    "nothing to do": replace(ADAMW, lr=0.0, weight_decay=0.0),
}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
def test_rules(rule: AdamRule) -> None:
    pairs = (
        ("dynamic2", "log1"),
        ("dynamic0", "log0"),
        ("mulaw5-prepay", "log5"),
        ("mulaw8", "fp32"),
        ("fp32", "fp32"),
    )
    check([Case({"exp_avg": m, "exp_avg_sq": v}, (3, 300), non_finite=True) for m, v in pairs], rule)


def test_amsgrad() -> None:
    states = {"exp_avg": "fp32", "exp_avg_sq": "fp32", "max_exp_avg_sq": "fp32"}
    check([Case(states, shape, dtype, non_finite=True) for shape in ((3, 300), (77,), ()) for dtype in DTYPES])


@pytest.mark.parametrize(
    "shape", [(), (1,), (127,), (4096,), (0, 5), (8, 3, 16, 16), (2, 64, 7, 7), (3, 70000)], ids=name
)
def test_shapes(shape: tuple[int, ...]) -> None:
    plain = Case({"exp_avg": "fp32", "exp_avg_sq": "fp32"}, shape)
    check([plain] if len(shape) < 2 or 0 in shape else [plain, Case(DEFAULT, shape)], steps=4)


def test_what_the_reference_serves() -> None:
    """Other dtypes and strides pass through, each said by `why_not`."""
    wide = Case({"exp_avg": "fp32", "exp_avg_sq": "fp32"}, (4, 64)).item()
    wide = replace(wide, param=wide.param.double(), grad=wide.grad.double())
    strided = Case(DEFAULT, (64, 128)).item()
    strided = replace(strided, param=strided.param.t().contiguous().t(), step=1)
    large = replace(Case(DEFAULT, (3, 5000), block=2048).item(), step=1)
    assert cpu.why_not(wide) == "a tensor is torch.float64"
    assert cpu.why_not(strided) == "a tensor is not contiguous"
    assert cpu.why_not(large) == "blocks of more than 1024"
    for item in (strided, large):
        ours, truth = copy.deepcopy(item), copy.deepcopy(item)
        cpu.adam_step_([ours], ADAMW)
        reference.adam_step_([truth], ADAMW)
        for key, value in helpers.tensors(ours).items():
            assert torch.equal(value, helpers.tensors(truth)[key])


BOXES = {
    "rows around 2^32": Box((2**25, 256), (2**24 - 3, 0), (6, 256)),
    "a block across 2^32": Box((2**25, 300), (2**32 // 300 - 2, 0), (4, 300)),
    "columns beyond 2^40": Box((2**28 + 9, 2**13), (2**28, 2**12), (3, 128)),
    "a cut of the middle dimension": Box((2**20, 70, 1000), (2**19, 9, 128), (3, 2, 200)),
}


@pytest.mark.parametrize("box", BOXES.values(), ids=BOXES.keys())
def test_indices_beyond_32_bits(box: Box) -> None:
    """Random numbers depend on the place in the whole parameter; none of that size is needed to see it."""
    cases = [Case({"exp_avg": "mulaw4", "exp_avg_sq": "log2"}, box.shape, torch.bfloat16, stochastic=True)]
    grid = Grid.of(box.whole, 128, box)

    def placed(items: list[Item]) -> list[Item]:
        for item in items:
            for state in item.states.values():
                assert isinstance(state, PackedState)
                state.grid = grid
        return items

    truth = helpers.run(lambda items, rule: reference.adam_step_(placed(items), rule), cases, ADAMW, 4)
    for isa in cpu.instruction_sets():
        cpu.use(isa)
        ours = helpers.run(lambda items, rule: cpu.adam_step_(placed(items), rule), cases, ADAMW, 4)
        helpers.assert_equal(ours, truth, cases)


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_threads_change_nothing(threads: int) -> None:
    cases = [
        Case(DEFAULT, (300, 1000)),
        Case({"exp_avg": "mulaw4", "exp_avg_sq": "log4"}, (65, 4096)),
        Case(DEFAULT, (3, 7)),
    ]
    torch.set_num_threads(1)
    truth = helpers.run(cpu.adam_step_, cases, ADAMW, 3)
    torch.set_num_threads(threads)
    helpers.assert_equal(helpers.run(cpu.adam_step_, cases, ADAMW, 3), truth, cases)


def test_flushing_of_denormals_changes_nothing() -> None:
    """Kernels bring their own floating-point environment."""
    cases = [Case(DEFAULT, (30, 1000))]
    truth = helpers.run(cpu.adam_step_, cases, ADAMW, 3)
    torch.manual_seed(0)
    items = [case.item(number) for number, case in enumerate(cases)]
    gradients = [case.gradients(3) for case in cases]
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        for step in range(3):
            items = [replace(item, grad=g[step], step=step + 1) for item, g in zip(items, gradients, strict=True)]
            cpu.adam_step_(items, ADAMW)
    finally:
        torch.set_flush_denormal(False)
    helpers.assert_equal(items, truth, cases)
