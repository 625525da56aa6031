"""Go on from a checkpoint of `examples/fsdp2.py` on any number of ranks, or on one process.

    torchrun --nproc-per-node 3 examples/resume_elsewhere.py --from runs/fsdp2 --steps 10
    python examples/resume_elsewhere.py --from runs/fsdp2 --steps 10

The newest complete checkpoint is taken: torch writes `.metadata` last, so a save that was
interrupted has none.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsdp2 import make_model, make_optimizer, shard, train_step
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


def newest(folder: Path) -> Path:
    complete = [path.parent for path in folder.glob("step-*/.metadata")]
    if not complete:
        raise SystemExit(f"{folder} holds no complete checkpoint; run examples/fsdp2.py first")
    return max(complete, key=lambda path: int(path.name.removeprefix("step-")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--from", dest="folder", type=Path, default=Path("runs/fsdp2"))
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group()
    model = shard(make_model())
    optimizer = make_optimizer(model)

    weights, states = get_state_dict(model, optimizer)
    state = {"model": weights, "optim": states, "step": 0}
    dcp.load(state, checkpoint_id=newest(options.folder))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])

    for step in range(state["step"], state["step"] + options.steps):
        loss = train_step(model, optimizer, step)
        if int(os.environ.get("RANK", 0)) == 0:
            print(f"step {step}: loss {loss:.4f}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
