"""The SGD step: that of `torch.optim.SGD`, with a momentum that may be packed and prepaid."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stquant.kernels.corrections import SGDConstants
from stquant.kernels.ops import Item, SGDRule
from stquant.kernels.reference.step import ItemPiece


def sgd_step_(items: Sequence[Item], rule: SGDRule) -> None:
    """Take one SGD step on a list of parameters, in place.

    Args:
        items: The parameters with their gradients and, with momentum, the state
            `momentum_buffer`; at step 1 it takes the gradient itself.
        rule: Hyperparameters.
    """
    for item in items:
        constants = SGDConstants.of(rule, single=item.param.dtype is not torch.float64)
        for part in ItemPiece.of(item, rule.seed):
            _step_piece_(part, rule, constants)


def _step_piece_(part: ItemPiece, rule: SGDRule, c: SGDConstants) -> None:
    weight = part.weight()
    update = grad = part.grad(weight, rule.maximize, c.decay)
    finite, error = grad.isfinite(), None
    if "momentum_buffer" in part.item.states:
        buffer = grad
        if part.item.step > 1:
            buffer = c.momentum * part.load("momentum_buffer") + c.rest * grad
        finite = buffer.isfinite()
        error = part.store_momentum_("momentum_buffer", buffer, finite)
        update = grad + c.momentum * buffer if rule.nesterov else buffer
    move = c.lr * update
    if error is not None:
        move = move + c.error * error
    part.store_weight_(weight - move, finite)
