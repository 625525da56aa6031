"""Bytes of files of torch.distributed.checkpoint, plain and compressed, against those of the live states.

Trains two layers for a few steps on random data, whose states compress less than those of a model
that has learned, and writes results/compressed_files.json. Run: python benchmarks/compressed_files.py
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import stquant
from stquant.report import record

TARGET = Path(__file__).parent / "results" / "compressed_files.json"
STEPS, WIDTH = 20, 512
COMPACT = stquant.Fixed(exp_avg=2, exp_avg_sq=0)
ROWS: list[tuple[str, torch.dtype, dict[str, Any]]] = [
    ('`"adaptive"`, the default', torch.float32, {}),
    ("2 bits for `exp_avg`, 0 for `exp_avg_sq`", torch.float32, {"policy": COMPACT}),
    *((f"`Fixed({bits})`", torch.float32, {"policy": stquant.Fixed(bits)}) for bits in (3, 4, 5, 6, 8)),
    ("2 and 0 bits, bf16 weights, 8-bit residual", torch.bfloat16, {"policy": COMPACT}),
    ("`Fixed(4)`, bf16 weights, 4-bit residual", torch.bfloat16, {"policy": stquant.Fixed(4), "master_bits": 4}),
]


def measure(name: str, dtype: torch.dtype, options: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    layers = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH, bias=False)
    model = nn.Sequential(*layers).to(dtype)
    optimizer = stquant.AdamW(model.named_parameters(), lr=1e-3, **options)
    for _ in range(STEPS):
        batch = torch.randn(64, WIDTH, dtype=dtype)
        (model(batch) - batch.roll(1, 1)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    state = {"optim": get_optimizer_state_dict(model, optimizer)}
    return {
        "optimizer": name,
        "live_bytes": optimizer.ledger().bytes,
        "plain_bytes": saved(state, []),
        "zstd_bytes": saved(state, [ZStandard()]),
    }


def saved(state: dict[str, Any], extensions: list[Any]) -> int:
    """Bytes of all files of a checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        dcp.save(state, storage_writer=FileSystemWriter(folder, _extensions=extensions), no_dist=True)
        return sum(file.stat().st_size for file in Path(folder).iterdir())


if __name__ == "__main__":
    record.write(TARGET, {"parameters": 4 * WIDTH**2, "rows": [measure(*row) for row in ROWS]})
