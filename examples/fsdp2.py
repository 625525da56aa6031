"""Train a small transformer under FSDP2, and save a checkpoint that any number of ranks can resume.

    torchrun --nproc-per-node 2 examples/fsdp2.py --steps 20 --out runs/fsdp2

Only the line that makes the optimizer differs from plain torch. `examples/resume_elsewhere.py` goes
on from the checkpoint, on another number of ranks or on one.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import stquant

VOCABULARY, WIDTH, LENGTH = 256, 128, 32


def make_model() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
                         nn.Linear(WIDTH, VOCABULARY))  # fmt: skip


def shard(model: nn.Module) -> nn.Module:
    """Shard the layers and the rest over all ranks; a process by itself keeps the model whole."""
    if not dist.is_initialized():
        return model
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(kind, (dist.get_world_size(),))
    for layer in model[1].layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return stquant.AdamW(model.named_parameters(), lr=1e-3)  # the one changed line


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    """Learn to continue x, x + 1, x + 2, ... modulo the vocabulary; every step has data of its own."""
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(VOCABULARY, (16, 1), generator=generator)
    tokens = ((start + torch.arange(LENGTH + 1)) % VOCABULARY).to(next(model.parameters()).device)
    logits = model(tokens[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def save(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, folder: Path) -> None:
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": states, "step": step}, checkpoint_id=folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("runs/fsdp2"))
    options = parser.parse_args()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    model = shard(make_model())
    optimizer = make_optimizer(model)
    for step in range(options.steps):
        loss = train_step(model, optimizer, step)
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss:.4f}")
    save(model, optimizer, options.steps, options.out / f"step-{options.steps}")
    if dist.get_rank() == 0:
        print(optimizer.ledger())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
