"""Everything that only a GPU can tell, in one script: parity, step time, bandwidth, memory, a training run.

1. Every format pair, dtype and residual against the reference on the CPU, bit for bit; a difference
   stops the script, so no speed of wrong kernels is ever printed.
2. Time of a step on GPT-2's 148 tensors: stquant, torch fused and foreach, and those of bitsandbytes,
   torchao and flashoptim that are installed. Contenders take turns; medians over rounds.
3. Bytes per second of a step on one large tensor, next to a device copy measured in the same run.
4. Peak memory beyond parameters, gradients and states.
5. GPT-2 124M in bf16 on the text of the Python standard library: stquant against fp32 AdamW and NAdam.

Writes `results/device_check.json`. With --toy it runs at toy size, without a GPU in triton's interpreter
(set TRITON_INTERPRET=1), writes nothing and times nothing worth reading.
Run: PYTHONPATH=. python benchmarks/device_check.py [--toy] [--steps 300]
"""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tests.cases import NON_NEGATIVE, PACKED, SIGNED
from tests.parity import helpers
from torch import Tensor, nn

import stquant
from stquant.codecs.blocks import Grid
from stquant.jobs.data import standard_library_text
from stquant.kernels import backend, reference
from stquant.kernels.ops import Item
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
    parser.add_argument("--toy", action="store_true", help="toy sizes; writes nothing")
    parser.add_argument("--steps", type=int, default=300, help="steps of each training run")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not options.toy:
        raise SystemExit("no GPU: use --toy with TRITON_INTERPRET=1")
    backend.resolve("triton")
    result: dict[str, Any] = {"torch": torch.__version__, "stquant": stquant.__version__}
    result["device"] = torch.cuda.get_device_name() if device.type == "cuda" else "interpreter"
    for name, part in (("parity", parity), ("step", step_times), ("bandwidth", bandwidth), ("training", training)):
        begin = time.perf_counter()
        result[name] = part(device, options.toy, options.steps)
        print(f"{name} ({time.perf_counter() - begin:.0f} s): {json.dumps(result[name])}", flush=True)
    if not options.toy:
        TARGET.write_text(json.dumps(result, indent=1) + "\n")


# ----------------------------------------------------------------------------------- parity


def parity(device: torch.device, toy: bool, steps: int) -> dict[str, int]:
    """Compare steps and transfers with the reference on the CPU; raises at the first difference."""
    cases = list(_cases(toy))
    kernels = backend.resolve("triton")

    def on_device(items: list[Item], rule: Any) -> None:
        moved = [_moved(item, device) for item in items]
        kernels.adam_step_(moved, rule)
        for item, there in zip(items, moved, strict=True):
            values = helpers.tensors(there)
            for name, tensor in helpers.tensors(item).items():
                tensor.copy_(values[name])

    rounds = 2 if toy else 5
    truth = helpers.run(reference.adam_step_, cases, helpers.ADAMW, rounds)
    helpers.assert_equal(helpers.run(on_device, cases, helpers.ADAMW, rounds), truth, cases)
    formats = PACKED[::9] if toy else PACKED
    for format in formats:
        values = torch.randn(3, 257 if toy else 5000)
        state = PackedState.zeros(format, Grid.of(values.shape, format.block))
        there = copy.deepcopy(state).to(device)
        reference.encode_(state, values)
        kernels.encode_(there, values.to(device))
        assert torch.equal(there.codes.cpu(), state.codes), format
        assert torch.equal(helpers.bits(there.scales.cpu()), helpers.bits(state.scales)), format
        decoded = kernels.decode(there, torch.empty_like(values, device=device)).cpu()
        assert torch.equal(helpers.bits(decoded), helpers.bits(reference.decode(state, torch.empty_like(values))))
        assert kernels.state_stats(there) == reference.state_stats(state), format
    return {"step_cases": len(cases), "transferred_formats": len(formats)}


def _cases(toy: bool) -> Iterator[helpers.Case]:
    floats = (torch.float32, torch.bfloat16, torch.float16)
    pairs = [(first.name, second.name) for first in SIGNED for second in NON_NEGATIVE] + [("fp32", "fp32")]
    for number, (first, second) in enumerate(pairs[::60] if toy else pairs):
        formats = {"exp_avg": first, "exp_avg_sq": second}
        yield helpers.Case(formats, (3, 257 if number % 2 else 256), non_finite=number % 3 == 0)
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
    }
    if not toy:
        contenders |= {
            "stquant 4 bits": lambda p: stquant.AdamW(p, policy=stquant.Fixed(4), backend="triton"),
            "torch fused": lambda p: torch.optim.AdamW(p, fused=True),
            "torch foreach": lambda p: torch.optim.AdamW(p, foreach=True),
            **{name: _other(*where) for name, where in OTHERS.items() if _installed(where[0])},
        }
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
    rows = {name: {"milliseconds": statistics.median(found)} for name, found in times.items()}
    for name, optimizer in optimizers.items():
        rows[name]["extra_bytes"] = _extra_bytes(optimizer.step, device)
    return rows


def bandwidth(device: torch.device, toy: bool, steps: int) -> dict[str, float]:
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
    if not toy:
        runs |= {
            "torch AdamW, fp32 weights": lambda p: torch.optim.AdamW(p, lr=6e-4, weight_decay=0.1, fused=True),
            "torch NAdam, fp32 weights": lambda p: torch.optim.NAdam(
                p, lr=6e-4, weight_decay=0.1, decoupled_weight_decay=True
            ),
        }
    return {name: _train(make, device, toy, 1 if toy else steps, "bf16" in name) for name, make in runs.items()}


def _train(make: Callable[[Any], Any], device: torch.device, toy: bool, steps: int, bf16: bool) -> dict[str, float]:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    context = 32 if toy else 512
    size = {"n_embd": 32, "n_layer": 1, "n_head": 2} if toy else {}
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
