"""Everything that only a GPU can tell, in one script: parity, step time, bandwidth, memory, a training run.

1. Every kernel against the reference on the CPU, bit for bit: AdamW in every format, dtype and residual,
   SGD, Lion, encode, decode, recode, statistics, and a step that a CUDA graph replays; a difference
   stops the script, so no speed of wrong kernels is ever printed.
2. Time of a step on GPT-2's 148 tensors: stquant, torch fused and foreach, and those of bitsandbytes,
   torchao and flashoptim that are installed. Contenders take turns; medians over rounds.
3. Bytes per second of a step on 1e9 elements, next to a device copy measured in the same run.
4. Peak memory beyond parameters, gradients and states, with both.
5. GPT-2 124M in bf16 on the text of the Python standard library: stquant against fp32 AdamW and NAdam.

Writes `results/device_check.json`, under `holds` whether the figures are those that are aimed at. With
--toy all parts run at toy size, without a GPU in triton's interpreter (set TRITON_INTERPRET=1); then
rivals for CUDA are left out, no figure is worth reading, and nothing is written but where --out says.
Run: PYTHONPATH=. python benchmarks/device_check.py [--toy] [--steps 300] [--out file.json]
"""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cases import NON_NEGATIVE, PACKED, SIGNED
from tests.parity import helpers
from tests.parity.test_sgd_lion import RULES
from torch import Tensor, nn

import stquant
from stquant.codecs.blocks import Grid
from stquant.codecs.format import Format
from stquant.jobs.data import standard_library_text
from stquant.kernels import backend, reference
from stquant.kernels.ops import Item, LionRule
from stquant.report.memory import tensors_of
from stquant.storage.packed import PackedState

TARGET = Path(__file__).parent / "results" / "device_check.json"
OTHERS = {
    "bitsandbytes AdamW8bit": ("bitsandbytes.optim", "AdamW8bit"),
    "torchao AdamW8bit": ("torchao.optim", "AdamW8bit"),
    "torchao AdamW4bit": ("torchao.optim", "AdamW4bit"),
    "flashoptim FlashAdamW": ("flashoptim", "FlashAdamW"),
}
DEFAULT = {"exp_avg": "dynamic2", "exp_avg_sq": "log1"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--toy", action="store_true", help="toy sizes")
    parser.add_argument("--steps", type=int, default=300, help="steps of each training run")
    parser.add_argument("--out", type=Path, help="where the figures go")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not options.toy:
        raise SystemExit("no GPU: use --toy with TRITON_INTERPRET=1")
    backend.resolve("triton")
    if device.type == "cpu":
        from tests.kernels.triton import interpreting

        interpreting.quicken(pytest.MonkeyPatch())
    result: dict[str, Any] = {"torch": torch.__version__, "stquant": stquant.__version__}
    result["device"] = torch.cuda.get_device_name() if device.type == "cuda" else "interpreter"
    parts = {"parity": parity, "graph": graph, "step": step_times, "bandwidth": bandwidth, "training": training}
    for name, part in parts.items():
        begin = time.perf_counter()
        result[name] = part(device, options.toy, options.steps)
        result[name]["seconds"] = round(time.perf_counter() - begin, 1)
        print(f"{name}: {json.dumps(result[name])}", flush=True)
    if not options.toy:
        result["holds"] = holds(result)
        print(f"holds: {json.dumps(result['holds'])}")
    target = options.out or (None if options.toy else TARGET)
    if target:
        target.write_text(json.dumps(result, indent=1) + "\n")


def holds(result: dict[str, Any]) -> dict[str, bool]:
    """Say which of the aims are reached."""
    ours, fused = (result["step"][name]["milliseconds"] for name in ("stquant default", "torch fused"))
    return {
        "a step takes at most 0.65 of torch's fused fp32 AdamW": ours <= 0.65 * fused,
        "a step moves at least 80 % of the bytes per second of a copy": result["bandwidth"]["share_of_copy"] >= 0.8,
        "a step takes less than 64 MB beside what stays": max(
            result["bandwidth"]["extra_bytes"], result["step"]["stquant default"]["extra_bytes"]
        )
        < 64e6,
        "the whole takes less than 8 minutes": sum(
            part["seconds"] for part in result.values() if isinstance(part, dict)
        )
        < 480,
    }


# ----------------------------------------------------------------------------------- parity


def parity(device: torch.device, toy: bool, steps: int) -> dict[str, Any]:
    """Compare steps and transfers with the reference on the CPU; raises at the first difference."""
    cases = list(_cases(toy))
    _check_step(device, "adam_step_", cases, helpers.ADAMW, 2 if toy else 5)
    rules = list(RULES.values())
    for rule in rules[2::2] if toy else rules:
        lion = isinstance(rule, LionRule)
        states = [{"exp_avg" if lion else "momentum_buffer": name} for name in ("dynamic3", "mulaw4", "fp32")]
        if not lion and rule.momentum == 0.0:
            states = [{}]
        others = [
            helpers.Case(formats, (3, row), torch.bfloat16, residual=8, stochastic=True)
            for formats in states
            for row in (256, 257)
        ]
        _check_step(device, "lion_step_" if lion else "sgd_step_", others[::5] if toy else others, rule, 2)
    formats = PACKED[::9] if toy else PACKED
    for format in formats:
        _check_transfers(device, format, (3, 257 if toy else 5000))
    return {"step_cases": len(cases), "rules": len(rules), "transferred_formats": len(formats)}


def _check_step(device: torch.device, operation: str, cases: list[helpers.Case], rule: Any, rounds: int) -> None:
    step = getattr(backend.resolve("triton"), operation)

    def on_device(items: list[Item], rule: Any) -> None:
        moved = [_moved(item, device) for item in items]
        step(moved, rule)
        for item, there in zip(items, moved, strict=True):
            values = helpers.tensors(there)
            for name, tensor in helpers.tensors(item).items():
                tensor.copy_(values[name])

    truth = helpers.run(getattr(reference, operation), cases, rule, rounds)
    helpers.assert_equal(helpers.run(on_device, cases, rule, rounds), truth, cases)


def _check_transfers(device: torch.device, format: Format, shape: tuple[int, ...]) -> None:
    kernels, values = backend.resolve("triton"), torch.randn(shape)
    state = PackedState.zeros(format, Grid.of(values.shape, format.block))
    there = copy.deepcopy(state).to(device)
    reference.encode_(state, values)
    kernels.encode_(there, values.to(device))
    _assert_same(there.tensors(), state.tensors(), format.name)
    decoded = kernels.decode(there, torch.empty_like(values, device=device))
    _assert_same([decoded], [reference.decode(state, torch.empty_like(values))], format.name)
    assert kernels.state_stats(there) == reference.state_stats(state), format
    wider = next(f for f in reversed(PACKED) if f.signed == format.signed)
    target = PackedState.zeros(wider, state.grid)
    beyond = copy.deepcopy(target).to(device)
    reference.recode_(state, target)
    kernels.recode_(there, beyond)
    _assert_same(beyond.tensors(), target.tensors(), f"{format.name} to {wider.name}")


def _assert_same(ours: Iterable[Tensor], truth: Iterable[Tensor], what: str) -> None:
    for a, b in zip(ours, truth, strict=True):
        assert torch.equal(helpers.bits(a.detach().cpu()), helpers.bits(b.detach().cpu())), what


def _cases(toy: bool) -> Iterator[helpers.Case]:
    """Every format twice, with short blocks and with whole ones, then dtypes and residuals."""
    floats = (torch.float32, torch.bfloat16, torch.float16)
    pairs = [
        (SIGNED[i % len(SIGNED)].name, NON_NEGATIVE[(i + shift) % len(NON_NEGATIVE)].name, row)
        for shift, row in ((0, 257), (3, 256))
        for i in range(max(len(SIGNED), len(NON_NEGATIVE)))
    ]
    pairs += [("fp32", "fp32", 257), ("fp32", "log1", 256), ("dynamic2", "fp32", 256)]
    for number, (first, second, row) in enumerate(pairs[::20] if toy else pairs):
        formats = {"exp_avg": first, "exp_avg_sq": second}
        yield helpers.Case(formats, (3, row), non_finite=number % 3 == 0)
    for param in floats[: 1 if toy else 3]:
        for grad in floats[: 1 if toy else 3]:
            yield helpers.Case(DEFAULT, (5, 1000), param, grad, stochastic=param is not torch.float32)
    for bits in (8,) if toy else (*range(1, 9), 16):
        yield helpers.Case(DEFAULT, (5, 1024), torch.bfloat16, residual=bits, stochastic=bits < 16)


def _moved(item: Item, device: torch.device) -> Item:
    item = copy.deepcopy(item)
    states = {name: state.to(device) for name, state in item.states.items()}  # type: ignore[attr-defined]
    residual = None if item.residual is None else item.residual.to(device)  # type: ignore[attr-defined]
    return replace(item, param=item.param.to(device), grad=item.grad.to(device), states=states, residual=residual)


def graph(device: torch.device, toy: bool, steps: int) -> dict[str, Any]:
    """Replay a captured step and compare it with steps that are not; without a GPU nothing is captured."""
    shapes = ((64, 128), (33, 130), (7,))
    grads = [[torch.randn(shape, device=device) for shape in shapes] for _ in range(4)]
    sides = []
    for capturable in (False, True):
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(shape).to(device)) for shape in shapes]
        lr = torch.tensor(1e-3, device=device)
        policy = stquant.Fixed(**DEFAULT)
        optimizer = stquant.AdamW(params, lr=lr, policy=policy, backend="triton", capturable=capturable)
        for param in params:
            param.grad = torch.empty_like(param)
        step: Callable[[], Any] = optimizer.step
        for number, drawn in enumerate(grads):
            for param, grad in zip(params, drawn, strict=True):
                assert param.grad is not None
                param.grad.copy_(grad)
            if capturable and number == 1 and device.type == "cuda":
                torch.cuda.synchronize()
                captured = torch.cuda.CUDAGraph()
                with torch.cuda.graph(captured):
                    optimizer.step()
                step = captured.replay
            step()
            lr.mul_(0.9)
        sides.append([tensor for param in params for tensor in (param, *tensors_of(optimizer.state[param]))])
    _assert_same(sides[1], sides[0], "a captured step")
    return {"captured": device.type == "cuda"}


# -------------------------------------------------------------------------- time and memory


def gpt2_shapes(layers: int, width: int, vocabulary: int) -> list[tuple[int, ...]]:
    """The parameters of a GPT-2; 148 for 12 layers."""
    block = [
        *[(width,), (width,), (width, 3 * width), (3 * width,), (width, width), (width,)],
        *[(width,), (width,), (width, 4 * width), (4 * width,), (4 * width, width), (width,)],
    ]
    return [(vocabulary, width), (1024, width), *block * layers, (width,), (width,)]


def step_times(device: torch.device, toy: bool, steps: int) -> dict[str, Any]:
    """Milliseconds of a step, and its peak memory beyond what stays."""
    shapes = [(64, 128), (128,), (40, 129)] if toy else gpt2_shapes(12, 768, 50257)
    contenders: dict[str, Callable[[list[nn.Parameter]], Any]] = {
        "stquant default": lambda p: stquant.AdamW(p, backend="triton"),
        "stquant 4 bits": lambda p: stquant.AdamW(p, policy=stquant.Fixed(4), backend="triton"),
        "torch fused": lambda p: torch.optim.AdamW(p, fused=True),
        "torch foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    }
    if not toy:
        contenders |= {name: _other(*where) for name, where in OTHERS.items() if _installed(where[0])}
    optimizers = {}
    for name, make in contenders.items():
        params = [nn.Parameter(torch.randn(shape, device=device) * 0.02) for shape in shapes]
        for param in params:
            param.grad = torch.randn_like(param) * 1e-3
        optimizers[name] = make(params)
        optimizers[name].step()
    times: dict[str, list[float]] = {name: [] for name in optimizers}
    for _ in range(1 if toy else 20):
        for name, optimizer in optimizers.items():
            times[name].append(_milliseconds(optimizer.step, device))
    rows: dict[str, Any] = {name: {"milliseconds": statistics.median(found)} for name, found in times.items()}
    for name, optimizer in optimizers.items():
        rows[name]["extra_bytes"] = _extra_bytes(optimizer.step, device)
    return rows


def bandwidth(device: torch.device, toy: bool, steps: int) -> dict[str, Any]:
    """Bytes per second that a step and a copy move, on one large fp32 tensor."""
    rows = 64 if toy else 1_000_000
    param = nn.Parameter(torch.zeros(rows, 128 if toy else 1024, device=device))
    param.grad = torch.randn_like(param)
    optimizer = stquant.AdamW([param], backend="triton")
    optimizer.step()
    moved = 3 * param.nbytes + 2 * sum(row.bytes for row in optimizer.ledger().rows)
    repeats = 1 if toy else 10
    step = statistics.median(_milliseconds(optimizer.step, device) for _ in range(repeats))
    extra = _extra_bytes(optimizer.step, device)
    target = torch.empty_like(param)
    copied = statistics.median(_milliseconds(lambda: target.copy_(param.detach()), device) for _ in range(repeats))
    return {
        "elements": param.numel(),
        "step_bytes_per_second": moved / step * 1e3,
        "copy_bytes_per_second": 2 * param.nbytes / copied * 1e3,
        "share_of_copy": moved / step * copied / (2 * param.nbytes),
        "extra_bytes": extra,
    }


def _milliseconds(call: Callable[[], Any], device: torch.device) -> float:
    """Time of a call until the device is done, launch included."""
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    synchronize()
    begin = time.perf_counter()
    call()
    synchronize()
    return (time.perf_counter() - begin) * 1e3


def _extra_bytes(call: Callable[[], Any], device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _installed(module: str) -> bool:
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True


def _other(module: str, name: str) -> Callable[[list[nn.Parameter]], Any]:
    return getattr(importlib.import_module(module), name)  # type: ignore[no-any-return]


# --------------------------------------------------------------------------------- training


def training(device: torch.device, toy: bool, steps: int) -> dict[str, Any]:
    """Held-out loss of a byte-level GPT-2 in bf16; the rivals keep fp32 weights under autocast."""
    runs: dict[str, Callable[[Any], Any]] = {
        "stquant default, bf16 weights": lambda p: stquant.AdamW(p, lr=6e-4, weight_decay=0.1, backend="triton")
    }
    runs |= {
        "torch AdamW, fp32 weights": lambda p: torch.optim.AdamW(p, lr=6e-4, weight_decay=0.1, fused=True),
        "torch NAdam, fp32 weights": lambda p: torch.optim.NAdam(
            p, lr=6e-4, weight_decay=0.1, decoupled_weight_decay=True
        ),
    }
    return {name: _train(make, device, toy, 2 if toy else steps, "bf16" in name) for name, make in runs.items()}


def _train(make: Callable[[Any], Any], device: torch.device, toy: bool, steps: int, bf16: bool) -> dict[str, float]:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    context = 32 if toy else 512
    size = {"n_embd": 64, "n_layer": 1, "n_head": 2} if toy else {}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=context, use_cache=False, **size)).to(device)
    model = model.bfloat16() if bf16 else model
    text = standard_library_text()
    optimizer = make(model.named_parameters() if bf16 else model.parameters())
    draw = torch.Generator().manual_seed(0)
    peak = torch.cuda.max_memory_allocated if device.type == "cuda" else lambda: 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 6e-4 * min(1.0, (step + 1) / 50)
        loss = _loss(model, _batch(text.train, context, 2 if toy else 16, draw), device)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    held_out = torch.Generator().manual_seed(1)
    with torch.no_grad():
        losses = [
            float(_loss(model, _batch(text.validation, context, 2 if toy else 16, held_out), device))
            for _ in range(1 if toy else 20)
        ]
    return {"loss": statistics.fmean(losses), "peak_bytes": peak()}


def _batch(text: Tensor, context: int, size: int, draw: torch.Generator) -> Tensor:
    starts = torch.randint(len(text) - context, (size,), generator=draw)
    return torch.stack([text[start : start + context] for start in starts.tolist()]).long()


def _loss(model: nn.Module, batch: Tensor, device: torch.device) -> Tensor:
    batch = batch.to(device)
    with torch.autocast(device.type, torch.bfloat16):
        return model(input_ids=batch, labels=batch).loss  # type: ignore[no-any-return]


if __name__ == "__main__":
    main()
