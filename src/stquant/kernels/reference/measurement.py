"""What every format of a state would cost in one step, measured on a sample of its blocks.

On the sample the step is computed as the kernels do, up to the point of rounding, and each
candidate format rounds the same values with the random numbers that the step itself draws.

Every result is an *energy*: a sum of squares, taken in a fixed order within a block and as a
fixed-point int64 across blocks, in bins of 16 octaves. So the parts of a shard, batches and
devices cannot change it: energies of parts add up to that of the whole, to the bit. A count is
the energy of zeros and ones, and a sum of magnitudes that of their roots. A block whose energy
is infinite does not count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from stquant.codecs import blocks, curves
from stquant.codecs.blocks import Piece
from stquant.codecs.format import Format
from stquant.codecs.rounding import Stream
from stquant.kernels.corrections import AdamConstants, LionConstants, SGDConstants
from stquant.kernels.ops import AdamRule, Candidates, Item, LionRule, Rule, SGDRule
from stquant.kernels.reference import stats
from stquant.kernels.reference.adam import LARGEST_SQUARE
from stquant.kernels.reference.pieces import root
from stquant.kernels.reference.sample import SAMPLE, grid_of, sampled
from stquant.kernels.reference.step import ItemPiece

BINS = 32
"""Bins of an energy; bin i holds squares from 2**(16*i - 256) up."""

_BATCH = 1 << 15
_OCTAVES = 16
_LOWEST = -256
_FRACTION = 2.0**14


def names(candidates: Candidates) -> tuple[str, ...]:
    """Return what is measured for a parameter whose states could have these formats, in order.

    `elements` and `blocks` count; `grad`, `grad.abs` and `grad.zeros` are of the gradient, `move`
    of the step of the weight. Of each state, `value` is of the new value before rounding, `change` of its
    difference to the stored one, `peak` of the largest value of each block, `kurtosis` of the
    squared value over the block's mean square. Of each format of a state, `error` is of what
    rounding drops, `stored` of what it keeps, `saturated` counts elements on the outermost
    levels, and `damage` is of the difference that it makes to the step of the weight.
    """
    shared = ["elements", "blocks", "grad", "grad.abs", "grad.zeros", "move"]
    for state, formats in candidates.items():
        shared += [f"{state}.{name}" for name in ("value", "change", "peak", "kurtosis")]
        shared += [f"{state}.{f.name}.{name}" for f in formats for name in ("error", "stored", "saturated", "damage")]
    return tuple(shared)


def measure(items: Sequence[Item], rule: Rule, candidates: Candidates) -> Tensor:
    """Measure parameters before they take a step; nothing is changed.

    Args:
        items: Parameters with the gradients of the step, all of one block size.
        rule: Hyperparameters of the step.
        candidates: For each state the formats that it could have, at any octaves their default.

    Returns:
        int64 `[items, len(names(candidates)), 32]`; zeros for an empty parameter.
    """
    found = torch.zeros(len(items), len(names(candidates)), BINS, dtype=torch.int64)
    for batch in _batches(items):
        parts = [
            _sample(items[position], piece, position, rule) for position in batch for piece in sampled(items[position])
        ]
        if parts:
            _add_energies_(found, _Sample.joined(parts), candidates)
    return found


def energies(bins: Tensor) -> Tensor:
    """Return energies as doubles `[...]` from their bins `[..., 32]`, added from the lowest bin up."""
    total = torch.zeros(bins.shape[:-1], dtype=torch.float64)
    for position in range(BINS):
        total = total + bins[..., position].double() * (2.0 ** (_LOWEST + _OCTAVES * position) / _FRACTION)
    return total


@dataclass(frozen=True, slots=True)
class _Sample:
    """Blocks of some parameters, `[blocks, block]` each, as the step computes them."""

    owner: Tensor
    """Position of the parameter that a block belongs to."""
    valid: Tensor
    """Whether an element is one of the parameter's rather than padding."""
    grad: Tensor
    values: dict[str, Tensor]
    """New values of the states before rounding."""
    stored: dict[str, Tensor]
    """Old values of the states."""
    means: dict[str, Tensor]
    """Block means `[blocks]` of the non-negative states."""
    random: dict[str, Tensor]
    constants: dict[str, Tensor]
    """What the step of the weight needs beside the states, `[blocks, 1]`."""
    move: Callable[[Mapping[str, Tensor], _Sample], Tensor] = field(repr=False)

    @classmethod
    def joined(cls, parts: Sequence[_Sample]) -> _Sample:
        def join(name: str) -> dict[str, Tensor]:
            return {key: torch.cat([getattr(part, name)[key] for part in parts]) for key in getattr(parts[0], name)}

        return cls(
            torch.cat([part.owner for part in parts]),
            torch.cat([part.valid for part in parts]),
            torch.cat([part.grad for part in parts]),
            join("values"),
            join("stored"),
            join("means"),
            join("random"),
            join("constants"),
            parts[0].move,
        )


def _batches(items: Sequence[Item]) -> Iterator[list[int]]:
    batch: list[int] = []
    for position, item in enumerate(items):
        if item.param.numel():
            batch.append(position)
        if len(batch) * SAMPLE >= _BATCH:
            yield batch
            batch = []
    yield batch


def _sample(item: Item, piece: Piece, owner: int, rule: Rule) -> _Sample:
    part, grid = ItemPiece(item, piece, rule.seed), grid_of(item)
    read = _READ[type(rule)](part, rule)

    def cut(values: Tensor) -> Tensor:
        return blocks.to_blocks(values, grid.block).flatten(0, 1).cpu()

    finite = read.finite
    values = {name: cut(torch.where(finite, value, 0.0)) for name, value in read.values.items()}
    count = len(next(iter(values.values())))
    return _Sample(
        owner=torch.full((count,), owner),
        valid=cut(finite.to(torch.uint8)).bool(),
        grad=cut(torch.where(finite, read.grad, 0.0)),
        values=values,
        stored={name: cut(value) for name, value in read.stored.items()},
        means={name: mean.flatten().cpu() for name, mean in read.means.items()},
        random={name: cut(part.random_at(Stream.EXP_AVG_SQ)) for name in read.means},
        constants={name: torch.full((count, 1), value) for name, value in read.constants.items()},
        move=read.move,
    )


@dataclass(frozen=True, slots=True)
class _Reading:
    """One parameter's share of a sample, in rows."""

    grad: Tensor
    finite: Tensor
    values: dict[str, Tensor]
    stored: dict[str, Tensor]
    means: dict[str, Tensor]
    constants: dict[str, float]
    move: Callable[[Mapping[str, Tensor], _Sample], Tensor]


def _grad(part: ItemPiece, maximize: bool, decay: float) -> Tensor:
    """The gradient of the step; the weights are read only if they decay into it."""
    weight = part.weight() if decay else torch.empty(0, dtype=torch.float32, device=part.item.param.device)
    return part.grad(weight, maximize, decay)


def _read_adam(part: ItemPiece, rule: AdamRule) -> _Reading:
    c = AdamConstants.of(rule, part.item.step)
    grad = _grad(part, rule.maximize, c.decay)
    state, piece = part.item.states["exp_avg_sq"], part.piece
    assert not isinstance(state, Tensor)
    stored = {name: part.load(name) for name in ("exp_avg", "exp_avg_sq")}
    exp_avg = c.beta1 * stored["exp_avg"] + c.beta1_rest * grad
    finite = exp_avg.isfinite()
    square = torch.where(finite, (grad * grad).clamp(max=LARGEST_SQUARE), 0.0)
    mean = blocks.block_mean(blocks.to_blocks(square, state.grid.block), piece.width)
    return _Reading(
        grad,
        finite,
        {"exp_avg": exp_avg, "exp_avg_sq": c.beta2 * stored["exp_avg_sq"] + c.beta2_rest * square},
        stored,
        {"exp_avg_sq": c.beta2 * state.scales[piece.rows, piece.blocks] + c.beta2_rest * mean},
        {"momentum": c.momentum, "eps": c.eps},
        _move_adam,
    )


def _move_adam(values: Mapping[str, Tensor], sample: _Sample) -> Tensor:
    denominator = root(values["exp_avg_sq"]) + sample.constants["eps"]
    move = sample.constants["momentum"] * values["exp_avg"] / denominator
    return torch.where(denominator > 0, move, 0.0)


def _read_sgd(part: ItemPiece, rule: SGDRule) -> _Reading:
    c = SGDConstants.of(rule)
    grad = _grad(part, rule.maximize, c.decay)
    stored = part.load("momentum_buffer")
    buffer = c.momentum * stored + c.rest * grad if part.item.step > 1 else grad
    lr = c.lr * c.momentum if rule.nesterov else c.lr
    return _Reading(
        grad, buffer.isfinite(), {"momentum_buffer": buffer}, {"momentum_buffer": stored}, {}, {"lr": lr}, _move_sgd
    )


def _move_sgd(values: Mapping[str, Tensor], sample: _Sample) -> Tensor:
    return sample.constants["lr"] * values["momentum_buffer"]


def _read_lion(part: ItemPiece, rule: LionRule) -> _Reading:
    c = LionConstants.of(rule)
    grad, stored = _grad(part, rule.maximize, decay=0.0), part.load("exp_avg")
    exp_avg = c.beta2 * stored + c.beta2_rest * grad
    constants = {"lr": c.lr, "beta1": c.beta1, "rest": c.beta1_rest}
    return _Reading(grad, exp_avg.isfinite(), {"exp_avg": exp_avg}, {"exp_avg": stored}, {}, constants, _move_lion)


def _move_lion(values: Mapping[str, Tensor], sample: _Sample) -> Tensor:
    """The next step, if its gradient was this one's: what is stored now enters a sign then."""
    c = sample.constants
    return c["lr"] * (c["beta1"] * values["exp_avg"] + c["rest"] * sample.grad).sign()


_READ: dict[type, Callable[[ItemPiece, Rule], _Reading]] = {
    AdamRule: _read_adam,  # type: ignore[dict-item]
    SGDRule: _read_sgd,  # type: ignore[dict-item]
    LionRule: _read_lion,  # type: ignore[dict-item]
}


def _add_energies_(found: Tensor, sample: _Sample, candidates: Candidates) -> None:
    """Add the energies of a sample to those of its parameters."""
    energy = _block_energy(torch.where(sample.valid, torch.stack(list(_quantities(sample, candidates))), 0.0))
    exponent = torch.frexp(energy).exponent - 1
    position = ((exponent - _LOWEST).clamp(min=0) // _OCTAVES).clamp(max=BINS - 1)
    fixed = (torch.ldexp(energy, -(_LOWEST + _OCTAVES * position)) * _FRACTION).round().long()
    column = torch.arange(len(energy))[:, None]
    flat = (sample.owner * len(energy) + column) * BINS + position
    found.view(-1).index_add_(0, flat.flatten(), fixed.flatten())


def _quantities(sample: _Sample, candidates: Candidates) -> Iterator[Tensor]:
    """Yield what is squared and summed, fp32 `[blocks, block]`, in the order of `names`."""
    move = sample.move(sample.values, sample)
    ones = torch.ones_like(move)
    yield ones
    yield _first_lane(ones[:, :1], ones)
    yield sample.grad
    yield root(sample.grad.abs())
    yield torch.eq(sample.grad, 0).to(move.dtype)
    yield move
    for state, formats in candidates.items():
        value = sample.values[state]
        mean_square = _block_energy(value) / sample.valid.sum(-1)
        ratio = (value.double() / mean_square.clamp(min=2.0**-250).sqrt()[:, None]).float()
        yield value
        yield value - sample.stored[state]
        yield _first_lane(value.abs().amax(-1, keepdim=True), value)
        yield ratio * ratio
        for format in formats:
            kept, outermost = _round(sample, state, format)
            yield value - kept
            yield kept
            yield outermost.to(value.dtype)
            yield sample.move({**sample.values, state: kept}, sample) - move


def _first_lane(values: Tensor, like: Tensor) -> Tensor:
    """Return one value of each block as a block of zeros but for that value."""
    return torch.nn.functional.pad(values, (0, like.shape[-1] - 1))


def _round(sample: _Sample, state: str, format: Format) -> tuple[Tensor, Tensor]:
    """Return what a format makes of the values, and whether they lie on its outermost levels."""
    values, octaves = sample.values[state], curves.default_octaves(format)
    scale = sample.means[state] if format.averaged else curves.block_scale(format, values)
    random = sample.random[state] if format.stochastic else None
    codes = curves.encode(format, values, scale[:, None], octaves, random)
    return curves.decode(format, codes, scale[:, None], octaves), stats.outermost(format, codes)


def _block_energy(values: Tensor) -> Tensor:
    """Sum the squares of each block in double, by the halving tree of a block's mean."""
    sums = values.double()
    sums = sums * sums
    while sums.shape[-1] > 1:
        half = sums.shape[-1] // 2
        sums = sums[..., :half] + sums[..., half:]
    return sums[..., 0]
