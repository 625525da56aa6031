"""Steps that a CUDA graph may capture: the same bits, and nothing waits for the device.

No graph can be captured here; what one would repeat runs in triton's interpreter on CPU tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import stquant
from stquant.codecs import catalog, rounding
from stquant.codecs.blocks import Box
from stquant.codecs.rounding import Stream
from stquant.kernels import backend
from stquant.kernels.corrections import correction_of, settles_at
from stquant.optim import capturing as steps
from stquant.report.memory import tensors_of
from tests.optim.helpers import gradients, parameters

launch = pytest.importorskip("stquant.kernels.triton.launch")
serving = pytest.importorskip("stquant.kernels.triton.serving")
capturing = pytest.importorskip("stquant.kernels.triton.capturing")
interpreting = pytest.importorskip("tests.kernels.triton.interpreting")

pytestmark = pytest.mark.skipif(not serving.INTERPRETED, reason="the kernels were loaded for a GPU")

SHAPES = ((32, 128), (33, 130), (7,))


class NoWaiting(TorchDispatchMode):
    """Raises where a value of a tensor is read on the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default), func
        assert func is not torch.ops.aten.equal.default
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    interpreting.quicken(monkeypatch)


ADAMW, LION = stquant.AdamW, stquant.Lion
CASES: dict[str, tuple[Callable[..., Any], torch.dtype, dict[str, Any]]] = {
    "default": (ADAMW, torch.float32, {"weight_decay": 0.1}),
    "bf16, residuals": (ADAMW, torch.bfloat16, {"policy": stquant.Fixed(4), "maximize": True}),
    "stochastic": (ADAMW, torch.bfloat16, {"master_bits": 0, "seed": -3}),
    "Adam": (stquant.Adam, torch.float32, {"betas": (0.0, 0.95), "weight_decay": 0.1}),
    "unpacked": (ADAMW, torch.float16, {"policy": "fp32", "amsgrad": True}),
    "Lion": (LION, torch.bfloat16, {"weight_decay": 0.1}),
}


@pytest.mark.parametrize("tensor_lr", [True, False], ids=["tensor", "number"])
@pytest.mark.parametrize("name", CASES)
def test_bits_are_those_of_other_steps(name: str, tensor_lr: bool) -> None:
    """Learning rates change in between, and counts start high enough for all parts of a key."""
    make, dtype, options = CASES[name]
    runs = []
    for capturable in (False, True):
        params = parameters(SHAPES, dtype)
        lr = torch.tensor(3e-3) if tensor_lr else 3e-3
        optimizer = make(params, lr=lr, backend="triton", capturable=capturable, **options)
        optimizer.init_state()
        assert name == "unpacked" or any(row.format != "fp32" for row in optimizer.ledger().rows if row.elements)
        for number, param in enumerate(params):
            optimizer.state[param]["step"].fill_((0, 12, 70_000)[number])  # no step measures
        for number, grads in enumerate(gradients(params, 3)):
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad.to(dtype)
            if capturable and number:  # the first step makes tables, as in the warm-up of a capture
                with NoWaiting():
                    optimizer.step()
            else:
                optimizer.step()
            group = optimizer.param_groups[0]
            group["lr"] = group["lr"].mul_(0.7) if tensor_lr else group["lr"] * 0.7
        runs.append([t.detach() for p in params for t in (p, *tensors_of(optimizer.state[p]))])
    for number, (ours, truth) in enumerate(zip(runs[1], runs[0], strict=True)):
        assert torch.equal(ours, truth), number


@pytest.mark.parametrize("stream", Stream)
def test_keys(stream: Stream) -> None:
    steps = [1, 2, 1000, 2**24]
    wanted = [rounding.key(seed, 5, stream, step) for step in steps for seed in (0, -1, 2**63)]
    stems = [rounding.parameter_key(seed, 5, stream) for _ in steps for seed in (0, -1, 2**63)]
    signed = torch.tensor([s - 2**64 if s >= 2**63 else s for s in stems])
    found = rounding.keys(signed, torch.tensor([step for step in steps for _ in range(3)]))
    assert [key % 2**64 for key in found.tolist()] == wanted


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9, 0.95, 0.999, 0.9999])
def test_tables_end_where_corrections_do(beta: float) -> None:
    last = settles_at(beta)
    assert all(correction_of(beta, step) == 1.0 for step in (last, last + 1, 2 * last, 10**7))


def test_decisions_wait() -> None:
    params = parameters(SHAPES[:2])
    optimizer = ADAMW(params, backend="triton", capturable=True, policy=stquant.Budget(bits=3.5, every=1))
    for grads in gradients(params, 2):
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        optimizer.step()
    assert not list(optimizer.decisions())
    optimizer.param_groups[0]["capturable"] = False
    optimizer.step()
    assert list(optimizer.decisions())


def test_a_file_goes_both_ways() -> None:
    params = parameters(SHAPES)
    for param in params:
        param.grad = torch.ones_like(param)
    ours, theirs = (ADAMW(params, backend="triton", capturable=c) for c in (True, False))
    ours.step()
    theirs.load_state_dict(ours.state_dict())
    assert [int(theirs.state[p]["step"]) for p in params] == [1, 1, 1]
    assert theirs.param_groups[0]["capturable"] is False
    ours.load_state_dict(theirs.state_dict())
    ours.step()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "reference"}, "backend='reference' is plain torch"),
        ({"backend": None}, "it is on cpu"),
        ({"backend": "triton", "policy": "flash8"}, "published recipe"),
        ({"backend": "triton", "betas": (0.9, 0.9999999)}, "tables of bias corrections"),
    ],
    ids=["reference", "cpu", "recipe", "betas"],
)
def test_what_cannot_be_captured_raises_and_changes_nothing(options: dict[str, Any], message: str) -> None:
    """As with torch's optimizers the step raises: parameters may move after the optimizer was made."""
    params = parameters(((64, 128),))
    params[0].grad = torch.ones_like(params[0])
    before = params[0].detach().clone()
    optimizer = ADAMW(params, capturable=True, **options)
    with pytest.raises(RuntimeError, match=f"capturable=True is not supported for parameter .*{message}"):
        optimizer.step()
    assert torch.equal(params[0], before)
    assert float(optimizer.state[params[0]]["step"]) == 0.0
    theirs = torch.optim.AdamW(params, capturable=True)
    with pytest.raises((RuntimeError, AssertionError), match="capturable=True"):
        theirs.step()


def test_a_capture_of_other_steps_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "has_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for make in (ADAMW, stquant.SGD):
        with pytest.raises(RuntimeError, match="a CUDA graph captures step"):
            make(parameters(SHAPES)).step()


def test_a_graph_gets_tables_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a cache holds may be gone at a replay, and is empty before one."""
    tables = pytest.importorskip("stquant.kernels.triton.tables")
    made: list[torch.Tensor] = []
    monkeypatch.setattr(tables, "run", lambda kernel, programs, table, chunks, constants: made.append(chunks))
    params = parameters(((64, 128),))
    params[0].grad = torch.ones_like(params[0])
    optimizer = ADAMW(params, backend="triton", capturable=True)
    optimizer.step()
    optimizer.step()
    assert made[0] is made[1]
    monkeypatch.setattr(tables, "_is_capturing", lambda device: True)
    optimizer.step()
    assert made[2] is not made[1]
    assert torch.equal(made[2], made[1])


def test_backends_say_who_serves() -> None:
    param = parameters(((64, 128),))[0]
    assert backend.why_not_compiled("triton", param, []) is None
    assert backend.why_not_compiled("triton", param.double(), []) == "a tensor is torch.float64"
    formats = [catalog.get("dynamic2", 64), catalog.get("log1", 64)]
    rows, columns = Box((64, 128), (8, 0), (8, 128)), Box((64, 128), (0, 64), (64, 64))
    assert backend.why_not_compiled("triton", param, formats, rows) is None
    assert backend.why_not_compiled("triton", param, formats, columns) is None
    four = torch.nn.Parameter(torch.zeros(64, 4, 4, 64))
    inner = Box((64, 4, 4, 64), (0, 1, 2, 0), (64, 2, 2, 64))
    assert "several dimensions" in str(backend.why_not_compiled("triton", four, formats, inner))
    assert "published recipe" in str(backend.why_not_compiled("triton", param, [catalog.get("dynamic4", 64)]))
