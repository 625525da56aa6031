"""What training steps of GPT-2 124M hold at most, and what their checkpoints take.

Trains the real model on source text, byte by byte, for a few steps in every setting; counts live
storages, and what torch's allocator gives out in one more step. Then writes checkpoints, loads
them into a fresh model and compares every bit. Writes results/step_memory.json.
Run: python benchmarks/step_memory.py
"""

import gc
import io
import itertools
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import GPT2Config, GPT2LMHeadModel

import stquant
from stquant.jobs.data import standard_library_text
from stquant.report import record
from stquant.report.memory import tensors_of

TARGET = Path(__file__).parent / "results" / "step_memory.json"
STEPS = 2
TOKENS = 8

POLICY = stquant.Fixed(exp_avg="dynamic2", exp_avg_sq="log0")
"""The demo's 2+0."""

ROWS: dict[str, tuple[torch.dtype, int | None, bool]] = {
    "torch AdamW, fp32": (torch.float32, None, False),
    "2+0, bf16, 8-bit residual": (torch.bfloat16, 8, False),
    "2+0, bf16, 8-bit residual, release": (torch.bfloat16, 8, True),
    "2+0, bf16, 4-bit residual, release": (torch.bfloat16, 4, True),
}
CHECKPOINTS = ("torch AdamW, fp32", "2+0, bf16, 8-bit residual", "2+0, bf16, 4-bit residual, release")


def build(dtype: torch.dtype, master_bits: int | None) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config()).to(dtype)
    model.loss_type = "ForCausalLM"
    if master_bits is None:
        return model, torch.optim.AdamW(model.named_parameters(), lr=1e-4)
    return model, stquant.AdamW(model.named_parameters(), lr=1e-4, policy=POLICY, master_bits=master_bits)


def take_step(model: Any, optimizer: Any, number: int) -> float:
    text = standard_library_text().train
    tokens = text[number * TOKENS : (number + 1) * TOKENS].long()[None]
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def backward_alone(model: Any, optimizer: Any, number: int) -> int:
    """Return the most bytes that a backward and its step add to what is live after the forward."""
    text = standard_library_text().train
    tokens = text[number * TOKENS : (number + 1) * TOKENS].long()[None]
    loss = model(input_ids=tokens, labels=tokens).loss
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        loss.backward()
        optimizer.step()
    optimizer.zero_grad()
    events = [event for event in found.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(itertools.accumulate(sizes))


def measure(name: str) -> tuple[dict[str, Any], Any, Any]:
    dtype, master_bits, released = ROWS[name]
    model, optimizer = build(dtype, master_bits)
    if released:
        stquant.release_gradients(model, optimizer)
    with stquant.memory.peak(model, optimizer) as first:
        losses = [take_step(model, optimizer, 0)]
    losses += [take_step(model, optimizer, number) for number in range(1, STEPS - 1)]
    with stquant.memory.peak(model, optimizer) as peak:
        losses.append(take_step(model, optimizer, STEPS - 1))
    sizes = sorted((p.numel() * p.element_size() for p in model.parameters()), reverse=True)
    row = {
        "run": name,
        "parameters": peak.each.parameters,
        "live_bytes": {k: getattr(peak.each, k) for k in ("weights", "residuals", "states")},
        "peak_gradient_bytes": peak.each.gradients,
        "peak_total_bytes": peak.together.total,
        "first_step_peak_total_bytes": first.together.total,
        "two_largest_gradients_bytes": sum(sizes[:2]),
        "backward_allocates_at_most_bytes": backward_alone(model, optimizer, STEPS),
        "losses": losses,
        "true_bits": 32.0 if master_bits is None else optimizer.ledger().bits,
    }
    return row, model, optimizer


def checkpoints(name: str, model: Any, optimizer: Any) -> list[dict[str, Any]]:
    forms: dict[str, dict[str, Any]] = {"default": {}}
    if isinstance(optimizer, stquant.AdamW):
        forms["packed"] = {"packed": True}
    rows = []
    for form, options in forms.items():
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(**options)}, file)
        row = {
            "run": name,
            "form": form,
            "bytes": file.tell(),
            "loads_bit_for_bit": loads(name, file, model, optimizer),
        }
        row["optimizer_bytes"] = size_of(optimizer.state_dict(**options))
        rows.append(row)
    return rows


def size_of(value: Any) -> int:
    file = io.BytesIO()
    torch.save(value, file)
    return file.tell()


def loads(name: str, file: io.BytesIO, model: Any, optimizer: Any) -> bool:
    file.seek(0)
    saved = torch.load(file)
    other, fresh = build(*ROWS[name][:2])
    other.load_state_dict(saved["model"])
    fresh.load_state_dict(saved["optimizer"])
    pairs = zip(
        itertools.chain(model.parameters(), tensors_of(list(optimizer.state.values()))),
        itertools.chain(other.parameters(), tensors_of(list(fresh.state.values()))),
        strict=True,
    )
    return all(torch.equal(a, b) for a, b in pairs)


def main() -> None:
    rows, files = [], []
    for name in ROWS:
        row, model, optimizer = measure(name)
        print(row, flush=True)
        rows.append(row)
        if name in CHECKPOINTS:
            files += checkpoints(name, model, optimizer)
            print(files, flush=True)
        del model, optimizer
        gc.collect()
        record.write(TARGET, {"model": "GPT-2 124M, tied head", "tokens": TOKENS, "rows": rows, "checkpoints": files})


if __name__ == "__main__":
    main()
