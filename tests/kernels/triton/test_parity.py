"""The triton kernels equal the reference to the bit, in triton's interpreter on CPU tensors."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace

import pytest
import torch

from stquant.codecs import catalog
from stquant.codecs.blocks import Box, Grid
from stquant.kernels import reference
from stquant.kernels.ops import AdamRule, Item
from stquant.storage.master import PackedResidual
from stquant.storage.packed import PackedState
from tests.cases import NON_NEGATIVE, PACKED, SIGNED, name
from tests.kernels import test_boxes
from tests.parity import helpers
from tests.parity.helpers import ADAMW, Case
from tests.parity.test_sgd_lion import LION, SGD
from tests.parity.test_transfers import assert_same, unwritten, values

launch = pytest.importorskip("stquant.kernels.triton.launch")
serving = pytest.importorskip("stquant.kernels.triton.serving")
interpreting = pytest.importorskip("tests.kernels.triton.interpreting")

pytestmark = [
    pytest.mark.skipif(not serving.INTERPRETED, reason="the kernels were loaded for a GPU"),
    # NumPy, in which the interpreter works, warns of infinities that are part of the cases.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

BF16, FP16 = torch.bfloat16, torch.float16
DEFAULT = {"exp_avg": "dynamic2", "exp_avg_sq": "log1"}
STEPS = 3


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    interpreting.quicken(monkeypatch)


def check(cases: list[Case], rule: AdamRule = ADAMW, steps: int = STEPS) -> None:
    truth = helpers.run(reference.adam_step_, cases, rule, steps)
    helpers.assert_equal(helpers.run(launch.adam_step_, cases, rule, steps), truth, cases)


PAIRS = [(SIGNED[i % len(SIGNED)].name, second.name) for i, second in enumerate(NON_NEGATIVE)]


@pytest.mark.parametrize(("first", "second"), PAIRS, ids=name)
def test_formats(first: str, second: str) -> None:
    check([Case({"exp_avg": first, "exp_avg_sq": second}, (3, 257), non_finite=True)])


@pytest.mark.parametrize(("first", "second"), [("fp32", "fp32"), ("fp32", "log2"), ("mulaw4", "fp32")], ids=name)
def test_plain_states(first: str, second: str) -> None:
    check([Case({"exp_avg": first, "exp_avg_sq": second}, (3, row), non_finite=True) for row in (128, 200)])


@pytest.mark.parametrize("row", [1, 33, 127, 128, 1000])
def test_rows(row: int) -> None:
    check([Case(DEFAULT, (3, row))])


@pytest.mark.parametrize("block", [32, 64, 256, 512, 1024])
def test_blocks(block: int) -> None:
    cases = [Case(DEFAULT, (2, 2 * block), block=block), Case(DEFAULT, (2, 2 * block - 23), block=block)]
    check(cases[: 1 + (block <= serving.MAX_RAGGED_BLOCK)], steps=2)


@pytest.mark.parametrize("row", [129, 256])
def test_dtypes(row: int) -> None:
    check(
        [
            Case(DEFAULT, (3, row), param, grad, stochastic=param is not torch.float32, non_finite=True)
            for param, grad in itertools.product((torch.float32, BF16, FP16), repeat=2)
        ],
        steps=2,
    )
    check([Case(DEFAULT, (3, row), param, param) for param in (BF16, FP16)], steps=2)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("blocks", [1, 31, 33])
def test_short_whole_blocks_of_16_bit_weights(dtype: torch.dtype, blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are accessed as one run, which ends where the parameter does."""
    monkeypatch.setattr(launch, "CHUNK", 1024)
    case = Case(DEFAULT, (blocks, 32), dtype, dtype, block=32, residual=16 if dtype is BF16 else 0, non_finite=True)
    check([case, replace(case, shape=(2, 32 * blocks))], steps=2)
    memory = torch.ones(32 * blocks + 1024, dtype=dtype)
    part = memory[: 32 * blocks].view(blocks, 32)
    launch.adam_step_([replace(case.item(), param=part, grad=torch.ones_like(part), step=1)], replace(ADAMW, lr=0.1))
    assert bool((part != 1).all())
    assert bool((memory[32 * blocks :] == 1).all())


@pytest.mark.parametrize("bits", [*range(1, 9), 16])
def test_residuals(bits: int) -> None:
    check([Case(DEFAULT, (3, (128, 257)[bits % 2]), BF16, residual=bits, stochastic=bits % 3 > 0)], steps=2)


RULES = {
    "adam": replace(ADAMW, decoupled=False, maximize=True),
    "no momentum": replace(ADAMW, betas=(0.0, 0.95)),
    "no eps": replace(ADAMW, eps=0.0, decoupled=False, weight_decay=0.0),
    "nothing to do": replace(ADAMW, lr=0.0, weight_decay=0.0),
}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
def test_rules(rule: AdamRule) -> None:
    check([Case(DEFAULT, (3, 300), non_finite=True)], rule)


def test_amsgrad() -> None:
    states = {"exp_avg": "fp32", "exp_avg_sq": "fp32", "max_exp_avg_sq": "fp32"}
    check([Case(states, shape, non_finite=True) for shape in ((3, 300), ())])


SGD_RULES = {
    "momentum": SGD,
    "dampening": replace(SGD, dampening=0.3, maximize=True),
    "nesterov": replace(SGD, nesterov=True, weight_decay=0.0),
}


@pytest.mark.parametrize("rule", SGD_RULES.values(), ids=SGD_RULES.keys())
def test_sgd(rule) -> None:
    cases = [
        Case({"momentum_buffer": format}, (3, row), non_finite=True)
        for format, row in (("dynamic2", 257), ("mulaw4", 128), ("fp32", 200))
    ]
    truth = helpers.run(reference.sgd_step_, cases, rule, STEPS)
    helpers.assert_equal(helpers.run(launch.sgd_step_, cases, rule, STEPS), truth, cases)


def test_sgd_without_momentum() -> None:
    rule, cases = replace(SGD, momentum=0.0), [Case({}, (3, 257), BF16, BF16, residual=8, stochastic=True)]
    truth = helpers.run(reference.sgd_step_, cases, rule, STEPS)
    helpers.assert_equal(helpers.run(launch.sgd_step_, cases, rule, STEPS), truth, cases)


def test_lion() -> None:
    cases = [Case({"exp_avg": f}, (3, row), non_finite=True) for f, row in (("mulaw8", 257), ("dynamic3", 128))]
    truth = helpers.run(reference.lion_step_, cases, LION, STEPS)
    helpers.assert_equal(helpers.run(launch.lion_step_, cases, LION, STEPS), truth, cases)


@pytest.mark.parametrize("shape", [(), (1,), (0, 5), (4096,), (8, 3, 16, 16)], ids=name)
def test_shapes(shape: tuple[int, ...]) -> None:
    packed = len(shape) > 1 and 0 not in shape
    check([Case(DEFAULT if packed else {"exp_avg": "fp32", "exp_avg_sq": "fp32"}, shape)], steps=2)


def test_tiles_of_the_size_that_gpus_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several programs for a parameter, a last one that is not full, and several parameters in a launch."""
    monkeypatch.setattr(launch, "CHUNK", 1024)
    monkeypatch.setattr(launch, "RAGGED_CHUNK", 128)
    check([Case(DEFAULT, (3, 512)), Case(DEFAULT, (2, 128)), Case(DEFAULT, (3, 257)), Case(DEFAULT, (2, 300))], steps=2)


def test_memory_off_the_16_byte_borders() -> None:
    """Views into a buffer, as wrappers with flat buffers make them, take the element-wise path."""
    states = {"exp_avg": "mulaw4", "exp_avg_sq": "log4"}
    truth, ours = (Case(states, (2, 256)).item() for _ in range(2))
    param, grad = torch.randn(513)[1:].view(2, 256), torch.randn(513)[1:].view(2, 256)
    truth, ours = (replace(i, param=p, grad=grad, step=1) for i, p in ((truth, param.clone()), (ours, param)))
    reference.adam_step_([truth], ADAMW)
    launch.adam_step_([ours], ADAMW)
    for key, value in helpers.tensors(ours).items():
        assert torch.equal(value, helpers.tensors(truth)[key])


FAR = [
    *(Box((2**24, 384), (11184810, 0), (4, 384)), Box((2**26, 130), (33038209, 0), (3, 130))),
    *(Box((2**24, 384), (11184810, 256), (4, 128)), Box((2**26, 194), (22139000, 128), (900, 66))),
]
"""Rows and columns in which element numbers pass 2**32, in whole blocks and in short ones."""


@pytest.mark.parametrize("box", [*test_boxes.BOXES, *FAR], ids=lambda box: name(box.whole))
def test_parts_of_sharded_parameters(box: Box) -> None:
    """Boxes cut along several inner dimensions are left to the reference, as numbers are drawn."""
    grid = Grid.of(box.whole, 64, box)
    states = {"exp_avg": catalog.get("dynamic2", 64), "exp_avg_sq": catalog.get("log1", 64)}
    for bits, dtype, drawn in ((8, BF16, True), (0, FP16, True), (0, torch.float32, False)):
        ours, truth = (
            Item(
                param=torch.linspace(-1, 1, grid.elements).view(box.shape).to(dtype),
                grad=torch.linspace(2, -3, grid.elements).view(box.shape),
                states={key: PackedState.zeros(format, grid) for key, format in states.items()},
                residual=PackedResidual.zeros(bits, grid) if bits else None,
                stochastic=drawn,
                step=1,
                noise_id=3,
                box=box,
            )
            for _ in range(2)
        )
        assert (serving.why_not(ours) is None) is (grid.strides() is not None)
        launch.adam_step_([ours], ADAMW)
        reference.adam_step_([truth], ADAMW)
        helpers.assert_equal([ours], [truth], [Case(DEFAULT)])


def test_what_the_reference_serves() -> None:
    item = replace(Case(DEFAULT, (64, 128)).item(), step=1)
    assert serving.why_not(item) is None
    strided = replace(item, param=item.param.t().contiguous().t())
    assert serving.why_not(strided) == "a tensor is not contiguous"
    assert serving.why_not(replace(item, param=item.param.double())) == "a tensor is torch.float64"
    recipe = replace(Case({"exp_avg": "dynamic4", "exp_avg_sq": "linear4"}, (64, 128)).item(), step=1)
    assert "published recipe" in str(serving.why_not(recipe))
    ragged = replace(Case(DEFAULT, (8, 1500), block=1024).item(), step=1)
    uneven = "blocks of more than 512 in rows that they do not divide, or off the 16-byte borders"
    assert serving.why_not(ragged) == uneven
    whole = replace(Case(DEFAULT, (2, 1024), block=1024).item(), step=1)
    assert serving.why_not(whole) is None
    moved = replace(whole, param=torch.randn(2049)[1:].view(2, 1024))
    assert serving.why_not(moved) == uneven
    assert serving.why_not_packed(whole.states["exp_avg"], [moved.param]) == uneven
    meta = replace(item, param=item.param.to("meta"), grad=item.grad.to("meta"))
    assert "a tensor is on meta" in str(serving.why_not(meta))
    for given in (strided, recipe, ragged, moved):
        ours, truth = copy.deepcopy(given), copy.deepcopy(given)
        launch.adam_step_([ours], ADAMW)
        reference.adam_step_([truth], ADAMW)
        for key, value in helpers.tensors(ours).items():
            assert torch.equal(value, helpers.tensors(truth)[key])


@pytest.mark.parametrize("format", PACKED, ids=name)
def test_encode_decode_and_statistics(format) -> None:
    for i, shape in enumerate([(3, 257), (2, 128)]):
        dtype = (torch.float32, BF16, FP16)[(format.bits + i) % 3]
        plain = values(shape).to(dtype)
        ours, truth = unwritten(format, shape), unwritten(format, shape)
        launch.encode_(ours, plain)
        reference.encode_(truth, plain)
        assert_same(ours, truth)
        decoded = launch.decode(ours, torch.full(shape, float("nan"), dtype=dtype))
        assert torch.equal(helpers.bits(decoded), helpers.bits(reference.decode(truth, torch.empty_like(decoded))))
    assert launch.state_stats(ours) == reference.state_stats(truth)


@pytest.mark.parametrize("source", PACKED, ids=name)
def test_recode(source) -> None:
    same = [f for f in PACKED if f.signed == source.signed]
    targets = [same[(source.number + 3) % len(same)], NON_NEGATIVE[3] if source.signed else SIGNED[2]]
    # NumPy's sum of negative zeros, all that dynamic0 has, is positive zero; a device's is negative.
    for target in targets[: 1 if source.name == "dynamic0" else 2]:
        shape = (2, 257)
        state = unwritten(source, shape)
        reference.encode_(state, values(shape))
        ours, truth = unwritten(target, shape), unwritten(target, shape)
        launch.recode_(state, ours)
        reference.recode_(state, truth)
        assert_same(ours, truth)
