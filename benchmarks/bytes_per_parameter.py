"""What a parameter of GPT-2 124M costs: live storages of weights, residuals and states.

Builds the real model and the real states, adaptive ones with one decision on random gradients, and
writes results/bytes_per_parameter.json. Run: python benchmarks/bytes_per_parameter.py
"""

from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import stquant
from stquant.policy.budget import Adaptive
from stquant.report import record
from stquant.report.memory import held_bytes, state_bytes

LR = 1e-6
TARGET = Path(__file__).parent / "results" / "bytes_per_parameter.json"
COMPACT = stquant.Fixed(exp_avg="dynamic2", exp_avg_sq="log0")
ROWS: list[tuple[str, torch.dtype, Any]] = [
    ("torch AdamW", torch.float32, None),
    ("`Fixed(bits=8)`", torch.float32, stquant.Fixed(bits=8)),
    ("`Fixed(bits=4)`", torch.float32, stquant.Fixed(bits=4)),
    ("2 bits for `exp_avg`, 0 for `exp_avg_sq`", torch.float32, COMPACT),
    ('`"adaptive"`, the default, at its limit', torch.float32, "adaptive"),
    ("`Fixed(bits=4)`, bf16 weights, 8-bit residual", torch.bfloat16, stquant.Fixed(bits=4)),
    ('`"adaptive"`, bf16 weights, 8-bit residual, at its limit', torch.bfloat16, "adaptive"),
]


def measure(name: str, dtype: torch.dtype, policy: Any) -> dict[str, Any]:
    """Return one row: bytes per parameter by kind."""
    model = GPT2LMHeadModel(GPT2Config()).to(dtype)
    params = list(model.parameters())
    count = sum(p.numel() for p in params)
    row: dict[str, Any] = {"optimizer": name, "parameters": count, "weights": held_bytes(params) / count}
    if name.startswith("torch"):
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(params, lr=0.0)
        for p in params:
            p.grad = torch.zeros_like(p)
        optimizer.step()
        return {**row, "residuals": 0.0, "states": state_bytes(optimizer) / count, "true_bits": 32.0}
    ours = stquant.AdamW(params, lr=LR, policy=policy)
    ours.init_state()
    if policy == "adaptive":
        # States start below the limit; a step with gradients at a decision fills it.
        ours.set_policy(Adaptive(every=1))
        for p in params:
            p.grad = torch.randn_like(p)
        ours.step()
    ledger = ours.ledger()
    residuals = ledger.residual_bytes / count
    return {**row, "residuals": residuals, "states": ledger.bytes / count - residuals, "true_bits": ledger.bits}


def main() -> None:
    rows = [measure(*row) for row in ROWS]
    for row in rows:
        row["total"] = row["weights"] + row["residuals"] + row["states"]
    record.write(TARGET, {"model": "GPT-2 124M, tied head", "rows": rows})


if __name__ == "__main__":
    main()
