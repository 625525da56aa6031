"""The Lion step (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023, algorithm 2).

Its update is a sign, so what a coarse momentum drops cannot be paid in advance.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stquant.kernels.corrections import LionConstants
from stquant.kernels.ops import Item, LionRule
from stquant.kernels.reference.step import ItemPiece


def lion_step_(items: Sequence[Item], rule: LionRule) -> None:
    """Take one Lion step on a list of parameters, in place.

    Args:
        items: The parameters with their gradients and the state `exp_avg`.
        rule: Hyperparameters.
    """
    for item in items:
        constants = LionConstants.of(rule, single=item.param.dtype is not torch.float64)
        for part in ItemPiece.of(item, rule.seed):
            _step_piece_(part, rule, constants)


def _step_piece_(part: ItemPiece, rule: LionRule, c: LionConstants) -> None:
    weight = part.weight()
    grad = part.grad(weight, rule.maximize, decay=0.0)
    exp_avg = part.load("exp_avg")
    direction = (c.beta1 * exp_avg + c.beta1_rest * grad).sign()
    exp_avg = c.beta2 * exp_avg + c.beta2_rest * grad
    finite = exp_avg.isfinite()
    part.store_momentum_("exp_avg", exp_avg, finite)
    part.store_weight_(c.keep * weight - c.lr * direction, finite)
