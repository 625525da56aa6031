"""What a parameter of GPT-2 124M costs: live storages of weights, residuals and states.

Builds the real model and the real states, without a step, and writes
results/bytes_per_parameter.json. Run: python benchmarks/bytes_per_parameter.py
"""

from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import stquant
from stquant.report import record
from stquant.report.memory import held_bytes, state_bytes

TARGET = Path(__file__).parent / "results" / "bytes_per_parameter.json"
ROWS: list[tuple[str, torch.dtype, Any]] = [
    ("torch AdamW", torch.float32, None),
    ("`Fixed(bits=8)`", torch.float32, stquant.Fixed(bits=8)),
    ("`Fixed(bits=4)`", torch.float32, stquant.Fixed(bits=4)),
    ("default: 2 bits for `exp_avg`, 1 bit for `exp_avg_sq`", torch.float32, None),
    ("`Fixed(bits=4)`, bf16 weights, 8-bit residual", torch.bfloat16, stquant.Fixed(bits=4)),
    ("default, bf16 weights, 8-bit residual", torch.bfloat16, None),
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
    ours = stquant.AdamW(params, **({} if policy is None else {"policy": policy}))
    ours.init_state()
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
