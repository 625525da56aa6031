"""How many launches a step takes, counted where every launch passes, and what one is given."""

from __future__ import annotations

import dataclasses
import types

import pytest
import torch

import stquant
from stquant.kernels import backend, triton

launch = pytest.importorskip("stquant.kernels.triton.launch")
serving = pytest.importorskip("stquant.kernels.triton.serving")
tables = pytest.importorskip("stquant.kernels.triton.tables")
RECORD = pytest.importorskip("stquant.kernels.triton.records").SIZE.value

pytestmark = pytest.mark.skipif(not serving.INTERPRETED, reason="the kernels were loaded for a GPU")


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Programs and records of each launch; nothing runs."""
    seen: list[tuple[int, int]] = []

    def count(kernel, programs, table, chunks, constants) -> None:
        assert table.numel() % RECORD == 0
        assert len(chunks) == programs
        seen.append((programs, table.numel() // RECORD))

    monkeypatch.setattr(tables, "run", count)
    return seen


def parameters(shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    """Parameters with gradients; all share one memory, as nothing is computed."""
    memory = torch.zeros(max(torch.Size(shape).numel() for shape in shapes), dtype=dtype)
    made = [torch.nn.Parameter(memory[: torch.Size(shape).numel()].view(shape)) for shape in shapes]
    for parameter in made:
        parameter.grad = parameter.detach()
    return made


def gpt(layers: int, width: int) -> list[tuple[int, ...]]:
    """Shapes of a model of the kind of GPT-2: 148 tensors for 12 layers."""
    block = [
        *[(width,), (width,), (width, 3 * width), (3 * width,), (width, width), (width,)],
        *[(width,), (width,), (width, 4 * width), (4 * width,), (4 * width, width), (width,)],
    ]
    return [(1000, width), (256, width), *block * layers, (width,), (width,)]


SMALL = [(64, 128), (128,), (5,), (40, 3), (64, 129)] * 1000
"""5,000 tensors: two packed kinds, with whole and with short blocks, and plain ones of both kinds."""


@pytest.mark.parametrize(
    ("make", "shapes", "tensors", "most"),
    [
        *((make, gpt(12, 128), 148, 2) for make in (stquant.AdamW, stquant.SGD, stquant.Lion)),
        (stquant.AdamW, SMALL, 5000, 4),
    ],
    ids=["AdamW-148", "SGD-148", "Lion-148", "AdamW-5000"],
)
def test_a_step_is_one_launch_per_combination(make, shapes, tensors: int, most: int, launches) -> None:
    """A combination is formats, dtypes, and whether rows are made of whole blocks."""
    options = {"momentum": 0.9} if make is stquant.SGD else {}
    optimizer = make(parameters(shapes), lr=1e-3, backend="triton", **options)
    optimizer.step()
    assert sum(records for _, records in launches) == tensors
    assert len(launches) <= most
    again = len(launches)
    optimizer.step()
    assert len(launches) == 2 * again


def test_another_dtype_is_another_launch(launches) -> None:
    mixed = parameters([(64, 128)] * 3) + parameters([(64, 128)] * 3, torch.bfloat16)
    stquant.AdamW(mixed, backend="triton").step()
    assert len(launches) == 2


def test_what_changes_between_steps_reaches_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is known of a parameter from its last step is used only as long as it holds."""
    seen: list[tuple[dict[str, int], list[int]]] = []
    monkeypatch.setattr(
        tables, "run", lambda kernel, n, table, chunks, constants: seen.append((constants, table.tolist()))
    )
    (param,) = parameters([(64, 128)])
    optimizer = stquant.Adam(
        [param], lr=1e-3, weight_decay=0.0, policy=stquant.Fixed(exp_avg=2, exp_avg_sq=1), backend="triton"
    )
    group = optimizer.param_groups[0]
    second_key, addresses = 14, slice(3, 5)

    def launched() -> tuple[dict[str, int], list[int]]:
        optimizer.step()
        return seen[-1]

    first, again = launched(), launched()
    assert first[0] == again[0]
    assert len({record[second_key] for _, record in seen}) == 2, "each step draws numbers of its own"
    assert first[1][22:31] != again[1][22:31], "bias corrections follow the step"
    param.grad = param.detach().clone()
    assert launched()[1][addresses] == [param.data_ptr(), param.grad.data_ptr()]
    param.grad_dtype = None
    param.grad = param.detach().bfloat16()
    assert launched()[0]["GRAD"] == 1
    group["weight_decay"] = 0.1
    assert launched()[0]["DECAYED"] == 1
    group["maximize"] = True
    assert launched()[0]["MAXIMIZE"] == 1
    state = optimizer.state[param]["exp_avg"]
    state.codes = state.codes.clone()
    assert launched()[1][7] == state.codes.data_ptr()


def test_every_block_belongs_to_one_program(launches) -> None:
    stquant.AdamW(parameters([(64, 128), (300, 256)]), backend="triton").step()
    assert launches == [(64 * 128 // launch.CHUNK + 300 * 256 // launch.CHUNK, 2)]


def test_an_optimizer_that_asks_for_triton_uses_it() -> None:
    assert backend.resolve("triton").name == "triton"
    explained = {entry.name: entry for entry in backend.explain()}
    assert explained["triton"].available
    assert "interpreter" in explained["triton"].why


@pytest.mark.parametrize(("installed", "message"), [(False, "pip install triton"), (True, "torch finds no GPU")])
def test_asked_for_and_missing_raises(monkeypatch: pytest.MonkeyPatch, installed: bool, message: str) -> None:
    monkeypatch.setattr(triton, "_is_installed", lambda: installed)
    monkeypatch.setattr(triton, "has_gpu", lambda: False)
    monkeypatch.setattr(triton, "interpreted", lambda: False)
    with pytest.raises(stquant.BackendError, match=message):
        stquant.AdamW([torch.nn.Parameter(torch.zeros(3))], backend="triton")
    assert not {entry.name: entry for entry in backend.explain()}["triton"].available


class OnGpu:
    """Stands for a tensor, or what has one, on a GPU."""

    is_cuda = True

    @property
    def param(self) -> OnGpu:
        return self


def test_with_a_gpu_each_tensor_finds_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is on the GPU goes to triton or, where that is missing, to the reference with a warning."""
    served: list[object] = []
    monkeypatch.setattr(triton, "has_gpu", lambda: True)
    by_device = backend.resolve(None)
    assert by_device.name == "by device"
    monkeypatch.setattr(
        backend, "_gpu", lambda: type("Gpu", (), {"adam_step_": lambda part, rule: served.extend(part)})
    )
    item = OnGpu()
    by_device.adam_step_([item], None)  # type: ignore[list-item, arg-type]
    assert served == [item]
    monkeypatch.undo()
    monkeypatch.setattr(triton, "why_not_available", lambda: "triton is not installed")
    backend._warn_once.cache_clear()
    with pytest.warns(RuntimeWarning, match="slow reference kernels on the GPU"):
        assert backend._gpu() is backend.REFERENCE


def test_with_a_gpu_measures_come_back_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each device is asked once, for all that it holds."""
    asked: list[int] = []

    def answering(value: int):
        def measure(part, rule, candidates) -> torch.Tensor:
            asked.append(len(part))
            return torch.full((len(part), 1, 32), value)

        return measure

    monkeypatch.setattr(backend, "_gpu", lambda: dataclasses.replace(backend.REFERENCE, measure=answering(7)))
    by_device = backend._by_device(dataclasses.replace(backend.REFERENCE, measure=answering(3)))
    on_cpu = types.SimpleNamespace(param=torch.empty(0))
    found = by_device.measure([OnGpu(), on_cpu, OnGpu()], None, {})  # type: ignore[list-item, arg-type]
    assert found[:, 0, 0].tolist() == [7, 3, 7]
    assert asked == [2, 1]
