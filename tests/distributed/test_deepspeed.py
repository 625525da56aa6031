"""DeepSpeed's ZeRO with one of our optimizers as its client.

ZeRO replaces the parameters of each group by one flat fp32 vector per rank, cut without regard to
tensors, after the optimizer was made. Every test has processes of its own, as importing DeepSpeed
changes torch.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import stquant
from stquant.storage.packed import PackedState
from tests.distributed.ranks import Ranks

pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")

CONFIG = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_clipping": 1.0,
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "bf16": {"enabled": True},
}
STOP, STEPS = 4, 8

Group = tuple[Tensor, Tensor, Tensor]
"""A flat parameter before a step, its gradient, and what the step made of it."""


class Recorder(stquant.AdamW):
    """Notes what every step was given and what it did."""

    seen: ClassVar[list[list[Group]]] = []

    def step(self, closure: Any = None) -> Any:
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        before = [(p.detach().clone(), p.grad.detach().clone()) for p in params]
        loss = super().step(closure)
        self.seen.append([(*pair, p.detach().clone()) for pair, p in zip(before, params, strict=True)])
        return loss


def policies(adaptive: bool) -> list[dict[str, Any]]:
    """Policies of the two groups, matrices and vectors; they need `flat=True`, as all is 1-D."""
    if adaptive:
        return [{"policy": stquant.Budget(bits=3.0, every=2, flat=True)}, {"policy": "fp32"}]
    return [{"policy": stquant.Fixed(exp_avg=2, exp_avg_sq=1, flat=True)}, {"policy": stquant.Fixed(5, flat=True)}]


def engine_of(stage: int, adaptive: bool) -> tuple[Any, Recorder]:
    import deepspeed

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 4200), nn.LayerNorm(4200))
    matrices, vectors = ([p for p in model.parameters() if (p.dim() > 1) is wide] for wide in (True, False))
    groups = [{"params": part, **own} for part, own in zip((matrices, vectors), policies(adaptive), strict=True)]
    optimizer = Recorder(groups, lr=1e-2)
    config = {**CONFIG, "zero_optimization": {"stage": stage}}
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)[0], optimizer


def take_steps(engine: Any, first: int, last: int) -> None:
    for step in range(first, last):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        batch = torch.randn(8, 64, generator=generator).bfloat16()
        engine.backward(engine(batch).float().square().mean())
        engine.step()


def states_of(optimizer: stquant.AdamW) -> list[list[Any]]:
    """Formats, codes, scales and steps of all states."""
    found = []
    for state in optimizer.state.values():
        tensors = [t for v in state.values() for t in ((v.codes, v.scales) if isinstance(v, PackedState) else (v,))]
        formats = [v.format.name if isinstance(v, PackedState) else "fp32" for v in state.values()]
        found.append([formats, *tensors])
    return found


def same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, list):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return torch.equal(ours, theirs) if isinstance(ours, Tensor) else bool(ours == theirs)


def results(seen: list[list[Group]], steps: int) -> list[Tensor]:
    """What the last so many steps made of both groups; ZeRO-3 calls `step` for each by itself."""
    return [after for given in seen for _, _, after in given][-2 * steps :]


def replayed(seen: list[list[Group]], adaptive: bool) -> bool:
    """Take recorded steps with an optimizer of plain flat vectors, each of a group of its own."""
    params: list[nn.Parameter] = []
    optimizer = None
    for step in range(STEPS):
        given = seen[step] if len(seen) == STEPS else [seen[2 * step][0], seen[2 * step + 1][0]]
        if optimizer is None:
            params = [nn.Parameter(before) for before, _, _ in given]
            groups = [{"params": [p], **own} for p, own in zip(params, policies(adaptive), strict=True)]
            optimizer = stquant.AdamW(groups, lr=1e-2)
        for param, (_, grad, _) in zip(params, given, strict=True):
            param.grad = grad
        optimizer.step()
        if not all(torch.equal(p, after) for p, (_, _, after) in zip(params, given, strict=True)):
            return False
    return True


def train(stage: int, adaptive: bool, folder: str) -> tuple[list[str], bool, bool]:
    """Train, save in between, and load that into a new engine.

    Returns:
        The formats at the end; whether steps are those of plain flat vectors; whether the new
        engine goes on bit for bit.
    """
    rank = str(dist.get_rank())
    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK=rank, WORLD_SIZE="2", RANK=rank)
    import deepspeed

    deepspeed.ops.__dict__["__compatible_ops__"] = {}  # else it compiles a transport of its own, for minutes
    Recorder.seen = []
    engine, optimizer = engine_of(stage, adaptive)
    take_steps(engine, 0, STOP)
    engine.save_checkpoint(folder)
    take_steps(engine, STOP, STEPS)
    straight = Recorder.seen
    equal = replayed(straight, adaptive)
    other, resumed = engine_of(stage, adaptive)
    other.load_checkpoint(folder)
    Recorder.seen = []
    take_steps(other, STOP, STEPS)
    goes_on = same(results(straight, STEPS - STOP), results(Recorder.seen, STEPS - STOP))
    found = states_of(optimizer)
    return [name for formats, *_ in found for name in formats], equal, goes_on and same(found, states_of(resumed))


@pytest.fixture(scope="module")
def pair() -> Iterator[Ranks]:
    group = Ranks(2)
    yield group
    group.close()


FIXED = ["dynamic2", "log1", "mulaw5", "log5"]


@pytest.mark.parametrize(("stage", "adaptive"), [(1, False), (2, True), (3, False)])
def test_flat_partitions_are_packed_and_resume(pair: Ranks, tmp_path: Path, stage: int, adaptive: bool) -> None:
    for formats, equal, goes_on in pair(train, stage, adaptive, str(tmp_path)):
        packed = [name for name in formats if name != "fp32"]
        # Budget of 3 bits: 2 + 3, and two scales of 32 bits for 128 elements.
        assert packed == (["dynamic2", "log3"] if adaptive else FIXED)
        assert equal, "a step is that of an optimizer over the same flat vectors"
        assert goes_on, "a new engine continues the checkpoint to the bit"
