"""torch's distributed checkpoint in a single process, where the default planner and its names apply, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import stquant
from tests.optim.helpers import gradients, run, same, snapshot

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def network(dtype: torch.dtype) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(96, 128), torch.nn.Linear(128, 64)).to(dtype)


def parts(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    weights, states = get_state_dict(model, optimizer)
    return {"weights": weights, "states": states}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_fresh_optimizer_of_another_width_receives_everything(steps: int, dtype: torch.dtype, tmp_path: Path) -> None:
    """A fresh optimizer has no state: the loader makes it step once with zero gradients at rate 0."""
    model, other = network(dtype), network(dtype)
    optimizer = stquant.AdamW(model.named_parameters(), lr=1e-2)
    grads = list(gradients(list(model.parameters()), steps + 2))
    run(optimizer, list(model.parameters()), grads[:steps])
    dcp.save(parts(model, optimizer), checkpoint_id=tmp_path)

    resumed = stquant.AdamW(other.named_parameters(), lr=1.0, policy=stquant.Fixed(8), seed=4)
    start = [p.detach().clone() for p in other.parameters()]
    found = parts(other, resumed)
    assert all(torch.equal(a, b) for a, b in zip(start, other.parameters(), strict=True))
    dcp.load(found, checkpoint_id=tmp_path)
    set_state_dict(other, resumed, model_state_dict=found["weights"], optim_state_dict=found["states"])

    for m, o in ((model, optimizer), (other, resumed)):
        run(o, list(m.parameters()), grads[steps:])
    assert same(snapshot(optimizer, list(model.parameters())), snapshot(resumed, list(other.parameters())))
