"""The AdamW step, as docs/numerics.md writes it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stquant.codecs import blocks, residual, rounding
from stquant.codecs.blocks import Grid, Piece
from stquant.codecs.rounding import Stream
from stquant.kernels.corrections import AdamConstants
from stquant.kernels.ops import AdamRule, Item, State
from stquant.kernels.reference import codec
from stquant.kernels.reference.pieces import pieces, read, root, write_

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
        grid = _grid(item)
        tensors = [t for t in (item.param, item.grad, *item.states.values()) if isinstance(t, Tensor)]
        for piece in pieces(grid, tensors):
            _step_piece_(item, piece, rule, constants)


def _step_piece_(item: Item, piece: Piece, rule: AdamRule, c: AdamConstants) -> None:
    weight = _load_weight(item, piece)
    grad = read(item.grad, piece).to(weight.dtype)
    if rule.maximize:
        grad = -grad
    if c.decay != 0.0:
        grad = grad + c.decay * weight

    first, second = item.states["exp_avg"], item.states["exp_avg_sq"]
    exp_avg = c.beta1 * _load(first, piece) + c.beta1_rest * grad
    finite = exp_avg.isfinite()

    error = _store_first_(item, first, piece, exp_avg, finite, rule)
    exp_avg_sq = _update_second_(item, second, piece, grad, finite, rule, c)
    if "max_exp_avg_sq" in item.states:
        exp_avg_sq = _keep_maximum_(item.states["max_exp_avg_sq"], piece, exp_avg_sq)

    move = c.momentum * exp_avg
    if error is not None:
        move = move + c.error * error
    weight = c.keep * weight - move / (root(exp_avg_sq) + c.eps)
    if not (isinstance(first, Tensor) and isinstance(second, Tensor)):
        weight = torch.where(finite, weight, float("nan"))
    _store_weight_(item, piece, weight, rule)


def _store_first_(
    item: Item, state: State, piece: Piece, exp_avg: Tensor, finite: Tensor, rule: AdamRule
) -> Tensor | None:
    """Store the momentum; return what the rounding dropped if the format prepays it."""
    if isinstance(state, Tensor):
        write_(state, piece, exp_avg)
        return None
    kept = torch.where(finite, exp_avg, 0.0)
    random = _random(item, Stream.EXP_AVG, piece, rule) if state.format.stochastic else None
    decoded = codec.store_signed_(state, piece, kept, random)
    return kept - decoded if state.format.prepay else None


def _update_second_(
    item: Item, state: State, piece: Piece, grad: Tensor, finite: Tensor, rule: AdamRule, c: AdamConstants
) -> Tensor:
    """Store the average of squares and return it unrounded."""
    square = grad * grad
    if isinstance(state, Tensor):
        exp_avg_sq = c.beta2 * read(state, piece) + c.beta2_rest * square
        write_(state, piece, exp_avg_sq)
        return exp_avg_sq
    square = torch.where(finite, square.clamp(max=LARGEST_SQUARE), 0.0)
    exp_avg_sq = c.beta2 * codec.load(state, piece) + c.beta2_rest * square
    mean = blocks.block_mean(blocks.to_blocks(square, state.grid.block), piece.width)
    mean = c.beta2 * state.scales[piece.rows, piece.blocks] + c.beta2_rest * mean
    kept = torch.where(finite, exp_avg_sq, 0.0)
    random = _random(item, Stream.EXP_AVG_SQ, piece, rule) if state.format.stochastic else None
    codec.store_mean_(state, piece, kept, mean, random)
    return exp_avg_sq


def _keep_maximum_(state: State, piece: Piece, exp_avg_sq: Tensor) -> Tensor:
    assert isinstance(state, Tensor), "amsgrad keeps its maximum unpacked"
    maximum = torch.maximum(read(state, piece), exp_avg_sq)
    write_(state, piece, maximum)
    return maximum


def _load(state: State, piece: Piece) -> Tensor:
    return read(state, piece) if isinstance(state, Tensor) else codec.load(state, piece)


def _load_weight(item: Item, piece: Piece) -> Tensor:
    """Return the weights in the compute dtype: fp64 stays, all others become fp32."""
    values = read(item.param, piece)
    if item.residual is not None:
        return residual.join(values, codec.load_residual(item.residual, piece))
    return values if values.dtype is torch.float64 else values.float()


def _store_weight_(item: Item, piece: Piece, weight: Tensor, rule: AdamRule) -> None:
    bits = 0 if item.residual is None else item.residual.bits
    random = _random(item, Stream.WEIGHT, piece, rule) if item.stochastic and bits < 16 else None
    if item.residual is not None or (random is not None and item.param.dtype is torch.bfloat16):
        weight, rest = residual.split(weight, bits, random)
        if item.residual is not None:
            codec.store_residual_(item.residual, piece, rest)
    elif random is not None and item.param.dtype is torch.float16:
        weight = rounding.round_to_float16(weight, random)
    write_(item.param, piece, weight)


def _random(item: Item, stream: Stream, piece: Piece, rule: AdamRule) -> Tensor:
    key = rounding.key(rule.seed, item.noise_id, stream, item.step)
    return rounding.random_bits(key, piece.index(item.param.device))


def _grid(item: Item) -> Grid:
    """The grid of the item's packed states, which is one; any grid serves if there are none."""
    for state in item.states.values():
        if not isinstance(state, Tensor):
            return state.grid
    return Grid.of(item.param.shape, 128) if item.residual is None else item.residual.grid
