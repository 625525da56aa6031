"""A step on a box of a parameter is that box of the step on the whole parameter."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from stquant.codecs import catalog
from stquant.codecs.blocks import Box, Grid
from stquant.kernels.backend import Operations, resolve
from stquant.kernels.ops import AdamRule, Item
from stquant.kernels.reference import measure
from stquant.storage.master import PackedResidual
from stquant.storage.packed import PackedState
from tests.cases import name

BLOCK = 64

BOXES = [
    Box((40, 130), (7, 0), (9, 130)),  # rows
    Box((40, 256), (0, 128), (40, 128)),  # columns, on a border
    Box((9, 200), (2, 128), (5, 72)),  # both, with the short block
    Box((5, 7, 160), (0, 3, 0), (5, 2, 160)),  # inner rows
    Box((5, 7, 192), (1, 3, 64), (3, 4, 128)),  # all three
    Box((3, 4, 5, 96), (1, 1, 2, 0), (2, 2, 3, 96)),  # two inner dimensions, which the compiled kernels leave
    Box((12, 16, 4, 4), (0, 8, 0, 0), (12, 8, 4, 4)),  # a row of several dimensions
    Box((300,), (128,), (172,)),
]

RULE = AdamRule(lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1, decoupled=True, maximize=False, seed=5)


def cut(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    for dim, (start, size) in enumerate(zip(box.start, box.shape, strict=True)):
        tensor = tensor.narrow(dim, start, size)
    return tensor


def item(box: Box, part: Box | None, residual: int) -> Item:
    """Return a bf16 item of the whole, or of a part of it; at the first step, so states are zero."""
    torch.manual_seed(0)
    weight, grad = torch.randn(box.whole).bfloat16(), torch.randn(box.whole)
    if part is not None:
        weight, grad = cut(weight, part).contiguous(), cut(grad, part).contiguous()
    grid = Grid.of(box.whole, BLOCK, part)
    states = {"exp_avg": "dynamic2", "exp_avg_sq": "log1"}
    return Item(
        param=weight,
        grad=grad,
        states={key: PackedState.zeros(catalog.get(format, BLOCK), grid) for key, format in states.items()},
        residual=PackedResidual.zeros(residual, grid) if residual else None,
        stochastic=True,
        step=1,
        noise_id=3,
        box=part,
    )


@pytest.mark.parametrize("box", BOXES, ids=lambda box: name(box.whole))
def test_element_numbers_are_those_of_the_whole(box: Box) -> None:
    whole = torch.arange(torch.Size(box.whole).numel()).view(box.whole)
    grid = Grid.of(box.whole, BLOCK, box)
    found = torch.cat([piece.index(torch.device("cpu")).flatten() for piece in grid.pieces(1 << 16)])
    assert torch.equal(found, cut(whole, box).flatten())
    strides = grid.strides()
    if strides is not None:
        rows = torch.arange(grid.rows)
        run = strides.run or grid.rows
        start = strides.origin + rows // run * strides.jump + rows % run * (strides.pitch or grid.row)
        assert torch.equal(start, cut(whole, box).reshape(grid.rows, grid.row)[:, 0])


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("residual", [0, 8])
@pytest.mark.parametrize("box", BOXES, ids=lambda box: name(box.whole))
def test_a_step_on_a_box(box: Box, residual: int, backend: str) -> None:
    kernels: Operations = resolve(backend)
    whole, part = item(box, None, residual), item(box, box, residual)
    for step in (1, 2, 3):
        whole, part = replace(whole, step=step), replace(part, step=step)
        kernels.adam_step_([whole], RULE)
        kernels.adam_step_([part], RULE)
    assert torch.equal(part.param, cut(whole.param, box))
    for key, state in part.states.items():
        of_whole = whole.states[key]
        assert isinstance(state, PackedState)
        assert isinstance(of_whole, PackedState)
        assert torch.equal(state.unpack(), cut(of_whole.unpack(), box))
        assert torch.equal(state.decode(), cut(of_whole.decode(), box))
    if part.residual is not None:
        assert isinstance(part.residual, PackedResidual)
        assert isinstance(whole.residual, PackedResidual)
        assert torch.equal(part.residual.unpack(), cut(whole.residual.unpack(), box))


def cells(box: Box) -> Iterator[Box]:
    """Yield boxes that make up the whole, cut where the box starts and ends."""
    edges = [
        sorted({0, start, start + size, whole})
        for start, size, whole in zip(box.start, box.shape, box.whole, strict=True)
    ]
    for sides in itertools.product(*(itertools.pairwise(edge) for edge in edges)):
        yield Box(box.whole, tuple(a for a, _ in sides), tuple(b - a for a, b in sides))


@pytest.mark.parametrize("box", BOXES, ids=lambda box: name(box.whole))
def test_what_is_measured_of_boxes_adds_up_to_that_of_the_whole(box: Box) -> None:
    formats = {"exp_avg": ("dynamic2", "mulaw4"), "exp_avg_sq": ("log1", "log5")}
    candidates = {state: [catalog.get(f, BLOCK) for f in ladder] for state, ladder in formats.items()}
    for step in (1, 2, 3):
        whole, *parts = (replace(item(box, part, 8), step=step) for part in (None, *cells(box)))
        total = measure([whole], RULE, candidates)
        assert total[0, 0].any()
        assert torch.equal(measure(parts, RULE, candidates).sum(0, keepdim=True), total)


def test_a_box_without_elements() -> None:
    empty = Box((3, 256), (3, 0), (0, 256))
    for backend in ("cpu", "reference"):
        resolve(backend).adam_step_([item(empty, empty, 8)], RULE)
