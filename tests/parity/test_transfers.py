"""Encode, decode, recode and statistics of the compiled kernels equal the reference to the bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from stquant.codecs.blocks import Grid
from stquant.kernels import cpu, reference
from stquant.storage.packed import PackedState
from tests.cases import NON_NEGATIVE, PACKED, SIGNED, name
from tests.parity.helpers import bits

pytestmark = pytest.mark.skipif(cpu.REASON is not None, reason="the compiled kernels are not installed")

SHAPES = ((3, 31), (2, 128), (3, 257), (5, 1000), (2, 4097), (8, 3, 16, 16))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(params=cpu.instruction_sets() if cpu.REASON is None else [])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    cpu.use(request.param)
    yield request.param
    cpu.use("")


def values(shape: tuple[int, ...]) -> Tensor:
    drawn = torch.randn(shape) * 10.0 ** torch.randint(-20, 18, shape[:1] + (1,) * (len(shape) - 1))
    drawn[torch.rand(shape) < 0.3] = 0.0
    flat = drawn.view(-1)
    flat[::37] = torch.tensor([float("inf"), float("-inf"), float("nan"), 1e-44, -1e-39, 3e38, -0.0])[
        torch.randint(7, flat[::37].shape)
    ]
    return drawn


def unwritten(format, shape) -> PackedState:
    state = PackedState.zeros(format, Grid.of(shape, format.block))
    state.codes.fill_(0xAA)
    state.scales.fill_(float("nan"))
    return state


def assert_same(ours: PackedState, truth: PackedState) -> None:
    assert torch.equal(ours.codes, truth.codes)
    assert torch.equal(bits(ours.scales), bits(truth.scales))


@pytest.mark.parametrize("format", PACKED, ids=name)
def test_encode_decode_and_statistics(isa: str, format) -> None:
    for shape in SHAPES:
        for dtype in DTYPES:
            plain = values(shape).to(dtype)
            ours, truth = unwritten(format, shape), unwritten(format, shape)
            cpu.encode_(ours, plain)
            reference.encode_(truth, plain)
            assert_same(ours, truth)
            decoded = torch.full(shape, float("nan"), dtype=dtype)
            cpu.decode(ours, decoded)
            assert torch.equal(bits(decoded), bits(reference.decode(truth, torch.empty(shape, dtype=dtype))))
        assert cpu.state_stats(ours) == reference.state_stats(truth)


@pytest.mark.parametrize("source", PACKED, ids=name)
def test_recode(isa: str, source) -> None:
    for i, target in enumerate([f for f in PACKED if f.signed == source.signed] + [SIGNED[2], NON_NEGATIVE[3]]):
        shape = SHAPES[i % len(SHAPES)]
        state = unwritten(source, shape)
        reference.encode_(state, values(shape))
        ours, truth = unwritten(target, shape), unwritten(target, shape)
        cpu.recode_(state, ours)
        reference.recode_(state, truth)
        assert_same(ours, truth)


@pytest.mark.parametrize("format", [f for f in PACKED if f.bits == 4], ids=name)
@pytest.mark.parametrize("threads", [1, 3])
def test_statistics_do_not_depend_on_threads(format, threads: int) -> None:
    before = torch.get_num_threads()
    state = unwritten(format, (100, 3000))
    torch.set_num_threads(threads)
    try:
        cpu.encode_(state, torch.randn(100, 3000))
        assert cpu.state_stats(state) == reference.state_stats(state)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("block", [32, 64, 512, 1024, 2048])
def test_blocks(block: int) -> None:
    for format in (f.with_block(block) for f in PACKED if f.bits in (0, 3, 4)):
        plain = values((5, 3000))
        ours, truth = unwritten(format, plain.shape), unwritten(format, plain.shape)
        cpu.encode_(ours, plain)
        reference.encode_(truth, plain)
        assert_same(ours, truth)
        assert cpu.state_stats(ours) == reference.state_stats(truth)
