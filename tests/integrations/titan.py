"""Runs with torchtitan's container of optimizers."""

from __future__ import annotations

from copy import deepcopy

from torch import nn
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig

from stquant.integrations.torchtitan import PackedOptimizersContainer
from tests.integrations.tables import OPTIMIZERS, batch, equal, perceptron, weights

Run = tuple[nn.Module, OptimizersContainer, LRSchedulersContainer]


def run(optimizer: str) -> Run:
    """Return a model, its container with groups with and without decay, and the schedule."""
    name = "AdamW" if optimizer == "torch" else "stquant.AdamW"
    shared = {key: value for key, value in OPTIMIZERS[optimizer][1].items() if key != "lr"}
    config = PackedOptimizersContainer.Config(
        implementation="for-loop",
        param_groups=[
            ParamGroupConfig(pattern=pattern, optimizer_name=name, optimizer_kwargs={"lr": 1e-2, "weight_decay": decay})
            for pattern, decay in ((r"bias$", 0.0), (".*", 0.1))
        ],
        optimizer_factory_kwargs_by_name={name: shared},
    )
    model = perceptron()
    container = config.build(model_parts=[model])
    schedule = LRSchedulersContainer.Config(warmup_steps=2).build(optimizers=container, training_steps=6)
    return model, container, schedule


def train(run: Run, steps: range) -> None:
    model, container, schedule = run
    for step in steps:
        data = batch(step)
        (model(data) - data).square().mean().backward()
        container.step()
        schedule.step()
        container.zero_grad()


def resumed() -> dict[str, bool]:
    """Return, by optimizer, whether a run of new objects goes on as one that was not stopped."""
    same = {}
    for optimizer in OPTIMIZERS:
        begun, again = run(optimizer), run(optimizer)
        train(begun, range(3))
        for part, saved in zip(again, begun, strict=True):
            part.load_state_dict(deepcopy(saved.state_dict()))
        assert [type(inner) for inner in again[1]] == [OPTIMIZERS[optimizer][0]]
        train(begun, range(3, 6))
        train(again, range(3, 6))
        same[optimizer] = equal(weights(begun[0]), weights(again[0]))
    return same
