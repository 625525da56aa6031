"""The AdamW step, as docs/numerics.md writes it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stquant.codecs import blocks
from stquant.codecs.rounding import Stream
from stquant.kernels.corrections import AdamConstants
from stquant.kernels.ops import AdamRule, Item
from stquant.kernels.reference import codec
from stquant.kernels.reference.pieces import root, write_
from stquant.kernels.reference.step import ItemPiece

LARGEST_SQUARE = 2.0**120
"""Squared gradients above are cut for packed states, so that means stay finite."""


def adam_step_(items: Sequence[Item], rule: AdamRule) -> None:
    """Take one AdamW or Adam step on a list of parameters, in place.

    Args:
        items: The parameters with their gradients and the states `exp_avg`, `exp_avg_sq` and,
            for amsgrad, `max_exp_avg_sq`.
        rule: Hyperparameters.
    """
    for item in items:
        constants = AdamConstants.of(rule, item.step, single=item.param.dtype is not torch.float64)
        for part in ItemPiece.of(item, rule.seed):
            _step_piece_(part, rule, constants)


def _step_piece_(part: ItemPiece, rule: AdamRule, c: AdamConstants) -> None:
    weight = part.weight()
    grad = part.grad(weight, rule.maximize, c.decay)
    exp_avg = c.beta1 * part.load("exp_avg") + c.beta1_rest * grad
    finite = exp_avg.isfinite()
    error = part.store_momentum_("exp_avg", exp_avg, finite)
    exp_avg_sq = _update_squares_(part, grad, finite, c)
    if "max_exp_avg_sq" in part.item.states:
        exp_avg_sq = _keep_maximum_(part, exp_avg_sq)

    move = c.momentum * exp_avg
    if error is not None:
        move = move + c.error * error
    part.store_weight_(c.keep * weight - move / (root(exp_avg_sq) + c.eps), finite)


def _update_squares_(part: ItemPiece, grad: Tensor, finite: Tensor, c: AdamConstants) -> Tensor:
    """Store the average of squares and return it unrounded."""
    state, piece = part.item.states["exp_avg_sq"], part.piece
    square = grad * grad
    if not isinstance(state, Tensor):
        square = torch.where(finite, square.clamp(max=LARGEST_SQUARE), 0.0)
    exp_avg_sq = c.beta2 * part.load("exp_avg_sq") + c.beta2_rest * square
    if isinstance(state, Tensor):
        write_(state, piece, exp_avg_sq)
        return exp_avg_sq
    kept, random = torch.where(finite, exp_avg_sq, 0.0), part.random(state, Stream.EXP_AVG_SQ)
    if state.format.averaged:
        mean = blocks.block_mean(blocks.to_blocks(square, state.grid.block), piece.width)
        mean = c.beta2 * state.scales[piece.rows, piece.blocks] + c.beta2_rest * mean
        codec.store_mean_(state, piece, kept, mean, random)
    else:
        codec.store_values_(state, piece, kept, random)
    return exp_avg_sq


def _keep_maximum_(part: ItemPiece, exp_avg_sq: Tensor) -> Tensor:
    state = part.item.states["max_exp_avg_sq"]
    assert isinstance(state, Tensor), "amsgrad keeps its maximum unpacked"
    maximum = torch.maximum(part.load("max_exp_avg_sq"), exp_avg_sq)
    write_(state, part.piece, maximum)
    return maximum
