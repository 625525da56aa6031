"""Runs with an optimizer that torchtune makes from a configuration."""

from __future__ import annotations

import torch
from omegaconf import OmegaConf
from torch import nn
from torchtune.config import instantiate

import stquant
from tests.integrations.tables import batch, equal, perceptron, weights

CONFIG = """
optimizer:
  _component_: stquant.AdamW
  lr: 1e-2
  betas: [0.9, 0.95]
  policy: solo42
  fused: False
"""


def goes_on_as_if_made_by_hand() -> bool:
    """Whether a configured optimizer, made anew and loaded half way as recipes do, has the bits of one made by hand."""
    configured, by_hand = perceptron(), perceptron()
    config = OmegaConf.create(CONFIG).optimizer
    optimizer = instantiate(config, configured.parameters())
    train(configured, optimizer, range(2))
    saved = optimizer.state_dict()
    optimizer = instantiate(config, configured.parameters())
    optimizer.load_state_dict(saved)
    train(configured, optimizer, range(2, 4))
    other = stquant.AdamW(by_hand.parameters(), lr=1e-2, betas=(0.9, 0.95), policy="solo42")
    train(by_hand, other, range(4))
    assert type(optimizer) is stquant.AdamW
    assert not equal(weights(by_hand), weights(perceptron()))
    return equal(weights(configured), weights(by_hand))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        data = batch(step)
        (model(data) - data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
