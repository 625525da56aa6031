"""What the steps of all optimizers share: one piece of weights and states, loaded and stored."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from stquant.codecs import residual, rounding
from stquant.codecs.blocks import Grid, Piece
from stquant.codecs.rounding import Stream
from stquant.kernels.ops import Item, State
from stquant.kernels.reference import codec
from stquant.kernels.reference.pieces import pieces, read, write_


class ItemPiece:
    """One piece of one parameter in a step.

    Args:
        item: The parameter with its gradient and states.
        piece: Which part of it.
        seed: Seed of stochastic rounding.
    """

    def __init__(self, item: Item, piece: Piece, seed: int) -> None:
        self.item = item
        self.piece = piece
        self._seed = seed

    @classmethod
    def of(cls, item: Item, seed: int) -> Iterator[ItemPiece]:
        """Cut a parameter into the pieces of a step."""
        tensors = [t for t in (item.param, item.grad, *item.states.values()) if isinstance(t, Tensor)]
        for piece in pieces(_grid(item), tensors):
            yield cls(item, piece, seed)

    @property
    def any_packed(self) -> bool:
        """Whether a state is packed, so that non-finite elements must not reach it."""
        return not all(isinstance(state, Tensor) for state in self.item.states.values())

    def weight(self) -> Tensor:
        """Return the weights in the compute dtype: fp64 stays, all others become fp32."""
        values = read(self.item.param, self.piece)
        if self.item.residual is not None:
            return residual.join(values, codec.load_residual(self.item.residual, self.piece))
        return values if values.dtype is torch.float64 else values.float()

    def grad(self, weight: Tensor, maximize: bool, decay: float) -> Tensor:
        """Return the gradient to descend in the compute dtype, with coupled weight decay."""
        grad = read(self.item.grad, self.piece).to(weight.dtype)
        if maximize:
            grad = -grad
        return grad if decay == 0.0 else grad + decay * weight

    def load(self, name: str) -> Tensor:
        """Return a state, decoded."""
        state = self.item.states[name]
        return read(state, self.piece) if isinstance(state, Tensor) else codec.load(state, self.piece)

    def store_momentum_(self, name: str, momentum: Tensor, finite: Tensor) -> Tensor | None:
        """Store a signed state; return what the rounding dropped if the format prepays it."""
        state = self.item.states[name]
        if isinstance(state, Tensor):
            write_(state, self.piece, momentum)
            return None
        kept = torch.where(finite, momentum, 0.0)
        decoded = codec.store_values_(state, self.piece, kept, self.random(state, Stream.EXP_AVG))
        return kept - decoded if state.format.prepay else None

    def store_weight_(self, weight: Tensor, finite: Tensor) -> None:
        """Store the weights; where a packed state met a non-finite value they become NaN."""
        item = self.item
        if self.any_packed:
            weight = torch.where(finite, weight, float("nan"))
        bits = 0 if item.residual is None else item.residual.bits
        random = self.random_at(Stream.WEIGHT) if item.stochastic and bits < 16 else None
        if item.residual is not None or (random is not None and item.param.dtype is torch.bfloat16):
            weight, rest = residual.split(weight, bits, random)
            if item.residual is not None:
                codec.store_residual_(item.residual, self.piece, rest)
        elif random is not None and item.param.dtype is torch.float16:
            weight = rounding.round_to_float16(weight, random)
        write_(item.param, self.piece, weight)

    def random(self, state: State, stream: Stream) -> Tensor | None:
        """Return random numbers for a packed state whose format needs them."""
        assert not isinstance(state, Tensor)
        return self.random_at(stream) if state.format.stochastic else None

    def random_at(self, stream: Stream) -> Tensor:
        """Return the random numbers of the piece's elements, of one stream."""
        key = rounding.key(self._seed, self.item.noise_id, stream, self.item.step)
        return rounding.random_bits(key, self.piece.index(self.item.param.device))


def _grid(item: Item) -> Grid:
    """The grid of the item's packed states, which is one; any grid serves if there are none."""
    for state in item.states.values():
        if not isinstance(state, Tensor):
            return state.grid
    if item.residual is not None:
        return item.residual.grid
    return Grid.of(item.box.whole if item.box else item.param.shape, 128, item.box)
