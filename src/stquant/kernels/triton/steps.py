"""The rules as kernels: a program takes the step of one tile of one parameter.

A launch works on a list of parameters that agree in everything that is a compile-time constant
here; `launch` groups them. Order of operations: `kernels.reference`.
"""

import triton
import triton.language as tl

from stquant.kernels.triton import codec
from stquant.kernels.triton.codec import PLAIN
from stquant.kernels.triton.records import (
    DATA,
    SIZE,
    constant,
    load_grad,
    load_scale,
    load_state,
    load_weight,
    state_field,
    store_momentum,
    store_state,
    store_weight,
)
from stquant.kernels.triton.tiles import FLOAT32, load, locate, only_live, store

LARGEST_SQUARE = tl.constexpr(2.0**120)
NAN = tl.constexpr(float("nan"))


@triton.jit
def adam(
    items,
    chunks,
    PARAM: tl.constexpr,
    GRAD: tl.constexpr,
    RESIDUAL_BITS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    DECAYED: tl.constexpr,
    FIRST: tl.constexpr,
    FIRST_BITS: tl.constexpr,
    PREPAY: tl.constexpr,
    SECOND: tl.constexpr,
    SECOND_BITS: tl.constexpr,
    NOISY: tl.constexpr,
    MAXIMUM: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """AdamW and Adam. Constants: those of `corrections.AdamConstants`."""
    chunk = tl.program_id(0)
    item = items + tl.load(chunks + chunk).to(tl.int64) * SIZE
    tile = locate(item, chunk, WHOLE, BLOCKS, BLOCK)
    weight = load_weight(item, tile, PARAM, RESIDUAL_BITS)
    grad = load_grad(item, tile, weight, constant(item, 5), GRAD, MAXIMIZE, DECAYED)

    first = load_state(item, tile, 0, FIRST, FIRST_BITS)
    first = constant(item, 0) * first + constant(item, 1) * grad
    finite = codec.is_finite(first)
    error = store_momentum(item, tile, first, finite, FIRST, FIRST_BITS)

    beta2, rest = constant(item, 2), constant(item, 3)
    square = grad * grad
    if SECOND != PLAIN:
        square = tl.where(square > LARGEST_SQUARE, LARGEST_SQUARE, square)
        square = only_live(tile, tl.where(finite, square, 0.0))
    second = beta2 * load_state(item, tile, 1, SECOND, SECOND_BITS) + rest * square
    if SECOND != PLAIN:
        mean = beta2 * load_scale(item, tile, 1) + rest * codec.block_mean(square, tile)
        kept = tl.where(finite, second, 0.0)
        store_state(item, tile, 1, kept, mean, SECOND, SECOND_BITS, NOISY)
    else:
        store(state_field(item, 1, DATA), tile, second, FLOAT32)
    if MAXIMUM:
        before = load(state_field(item, 2, DATA), tile, FLOAT32)
        second = tl.where((before > second) | (before != before), before, second)
        store(state_field(item, 2, DATA), tile, second, FLOAT32)

    move = constant(item, 6) * first
    if PREPAY:
        move = move + constant(item, 7) * error
    weight = constant(item, 4) * weight - tl.div_rn(move, tl.sqrt_rn(second) + constant(item, 8))
    if FIRST != PLAIN or SECOND != PLAIN:
        weight = tl.where(finite, weight, NAN)
    store_weight(item, tile, weight, PARAM, RESIDUAL_BITS, STOCHASTIC)


@triton.jit
def sgd(
    items,
    chunks,
    PARAM: tl.constexpr,
    GRAD: tl.constexpr,
    RESIDUAL_BITS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    DECAYED: tl.constexpr,
    FIRST: tl.constexpr,
    FIRST_BITS: tl.constexpr,
    PREPAY: tl.constexpr,
    NESTEROV: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """SGD; FIRST is 0 without momentum. Constants: those of `SGDConstants`, then whether step is 1."""
    chunk = tl.program_id(0)
    item = items + tl.load(chunks + chunk).to(tl.int64) * SIZE
    tile = locate(item, chunk, WHOLE, BLOCKS, BLOCK)
    weight = load_weight(item, tile, PARAM, RESIDUAL_BITS)
    grad = load_grad(item, tile, weight, constant(item, 3), GRAD, MAXIMIZE, DECAYED)
    move = constant(item, 0) * grad
    finite = codec.is_finite(grad)
    if FIRST != 0:
        momentum = constant(item, 1)
        buffer = load_state(item, tile, 0, FIRST, FIRST_BITS)
        buffer = tl.where(constant(item, 5) != 0.0, grad, momentum * buffer + constant(item, 2) * grad)
        finite = codec.is_finite(buffer)
        error = store_momentum(item, tile, buffer, finite, FIRST, FIRST_BITS)
        move = constant(item, 0) * (grad + momentum * buffer if NESTEROV else buffer)
        if PREPAY:
            move = move + constant(item, 4) * error
    weight = weight - move
    if FIRST > PLAIN:
        weight = tl.where(finite, weight, NAN)
    store_weight(item, tile, weight, PARAM, RESIDUAL_BITS, STOCHASTIC)


@triton.jit
def lion(
    items,
    chunks,
    PARAM: tl.constexpr,
    GRAD: tl.constexpr,
    RESIDUAL_BITS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    FIRST: tl.constexpr,
    FIRST_BITS: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Lion. Constants: those of `LionConstants`."""
    chunk = tl.program_id(0)
    item = items + tl.load(chunks + chunk).to(tl.int64) * SIZE
    tile = locate(item, chunk, WHOLE, BLOCKS, BLOCK)
    weight = load_weight(item, tile, PARAM, RESIDUAL_BITS)
    grad = load_grad(item, tile, weight, 0.0, GRAD, MAXIMIZE, False)
    first = load_state(item, tile, 0, FIRST, FIRST_BITS)
    ahead = constant(item, 1) * first + constant(item, 2) * grad
    direction = (ahead > 0.0).to(tl.float32) - (ahead < 0.0).to(tl.float32)
    first = constant(item, 3) * first + constant(item, 4) * grad
    finite = codec.is_finite(first)
    store_momentum(item, tile, first, finite, FIRST, FIRST_BITS)
    weight = constant(item, 5) * weight - constant(item, 0) * direction
    if FIRST != PLAIN:
        weight = tl.where(finite, weight, NAN)
    store_weight(item, tile, weight, PARAM, RESIDUAL_BITS, STOCHASTIC)
