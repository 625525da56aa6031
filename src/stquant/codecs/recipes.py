"""The number formats of published low-bit optimizers, for comparison and migration.

Seven further families beside our own (`curves`); codes ascend with the value in all of them.

- TREE and UNSIGNED_TREE: decimal exponents, each followed by as many evenly spaced fractions as
  the remaining bits hold (Dettmers, "8-Bit Approximations for Parallelism in Deep Learning", 2015;
  Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2021).
- LINEAR: (i + 1) / 2**bits, without zero (Li et al., "Memory Efficient Optimizers with 4-bit
  States", 2023).
- NORMAL: quantiles of the normal distribution (Dettmers et al., "QLoRA", 2023, appendix E).
- SOFTSIGN and ROOT: integers times a fp16 scale, of 2z / (1 + |z|) and of the square root, as the
  FlashOptim package stores momenta and averages of squares.
- GEOMETRIC: top * base**k; two fp32 scales, the block's largest value and
  base = (tenth percentile / top) ** (1 / (levels - 1)), rounded in log space (SOLO: Xu et al.,
  "Pushing the Limits of Low-Bit Optimizers", 2025).

Only the reference serves these. GEOMETRIC takes logarithms, in double; the others keep to fp32
`+ - * /` and square roots.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from stquant.codecs.format import RECIPE_FAMILIES, Family, Format

TINY = 2.0**-100
"""Scales below count as zero, as in our own families; the packages have floors of their own."""

LOWEST_SHARE = 2.0**-60
"""Least tenth percentile of a GEOMETRIC block relative to its largest value; SOLO has none."""

QUANTILE = 0.1
_SOFTSIGN_TOP = 127
_ROOT_TOP = 255

NORMAL_LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""NF4, as published: each side's quantiles divided by the outermost."""


def is_recipe(format: Format) -> bool:
    """Whether this module holds the arithmetic of a format."""
    return format.family in RECIPE_FAMILIES


def levels(format: Format) -> Tensor:
    """Return the value of every code of a block of scale 1; NaN marks a code never produced.

    GEOMETRIC levels depend on the block; shown are those of one whose base is a half.
    """
    codes = torch.arange(2**format.bits, dtype=torch.int32)
    scale = torch.tensor([1.0, 0.5]) if format.family is Family.GEOMETRIC else torch.ones(1)
    values = decode(format, codes, scale)
    if format.family is Family.SOFTSIGN:
        values[2 * _SOFTSIGN_TOP + 1 :] = float("nan")
    return values


def block_scale(format: Format, blocks: Tensor, width: int | None = None) -> Tensor:
    """Scale of each block: its largest magnitude, of the square root for ROOT.

    Args:
        format: A format of a recipe family.
        blocks: fp32 values `[..., block]`, finite; non-negative unless the format is signed.
        width: Elements of a row of `[rows, blocks, block]`; what lies beyond is padding. None if
            every block is full.

    Returns:
        fp32 `[...]`, for GEOMETRIC `[..., 2]` with the base; 0 where the magnitude is below `TINY`.
    """
    top = blocks.abs().amax(-1)
    if format.family is Family.ROOT:
        top = _root(top)
    top = torch.where(top < TINY, 0.0, top)
    if format.family is not Family.GEOMETRIC:
        return top
    share = _ratio(_low_quantile(blocks, width), top).double().clamp(LOWEST_SHARE, 1.0)
    base = share.pow(1.0 / (2**format.bits - 1)).float()
    return torch.stack((top, torch.where(top > 0, base, 1.0)), -1)


def unit_scale(format: Format, scale: Tensor) -> Tensor:
    """Return scales under which a state decodes to its levels: 1, or 0 where the scale is zero."""
    if format.family is Family.GEOMETRIC:
        return torch.stack((scale[..., 0].sign(), scale[..., 1]), -1)
    return scale.float().sign()


def encode(format: Format, values: Tensor, scale: Tensor, random: Tensor | None = None) -> Tensor:
    """Round values to codes.

    Args:
        format: A format of a recipe family.
        values: fp32 values, finite; non-negative unless the format is signed.
        scale: fp32 scales, broadcastable to `values` once GEOMETRIC's last dimension is taken off.
        random: Integers below 2**32, one per value (int64), for a stochastic format; None rounds
            to nearest.

    Returns:
        int32 codes of the shape of `values`.
    """
    if format.family is Family.GEOMETRIC:
        return _encode_geometric(format.bits, values, scale, random)
    if format.family is Family.SOFTSIGN:
        ratio = _ratio(values, scale)
        soft = 2.0 * ratio / (1.0 + ratio.abs())
        return (soft * _SOFTSIGN_TOP + 0.5).floor().int() + _SOFTSIGN_TOP
    if format.family is Family.ROOT:
        return (_ratio(_root(values), scale) * _ROOT_TOP + 0.5).floor().int()
    return _encode_table(table(format, values.device), _ratio(values, scale))


def decode(format: Format, codes: Tensor, scale: Tensor) -> Tensor:
    """Return the fp32 values of integer codes; zeros where the scale is zero."""
    if format.family is Family.GEOMETRIC:
        return _decode_geometric(format.bits, codes, scale)
    if format.family is Family.SOFTSIGN:
        soft = _divide((codes - _SOFTSIGN_TOP).float(), _SOFTSIGN_TOP)
        values = soft / (2.0 - soft.abs()) * scale
    elif format.family is Family.ROOT:
        root = _divide(codes.float(), _ROOT_TOP) * scale
        values = root * root
    else:
        values = table(format, codes.device)[codes] * scale
    return torch.where(scale > 0, values, 0.0)


@functools.lru_cache(maxsize=32)
def table(format: Format, device: torch.device | str = "cpu") -> Tensor:
    """Return the ascending fp32 levels of a format that is defined by a table."""
    if format.family is Family.NORMAL:
        return torch.tensor(NORMAL_LEVELS, dtype=torch.float32, device=device)
    if format.family is Family.LINEAR:
        return torch.arange(1, 2**format.bits + 1, dtype=torch.float32, device=device) * 2.0**-format.bits
    return _tree(format.bits, format.signed).to(device)


def _tree(bits: int, signed: bool) -> Tensor:
    """Levels of a tree: zero, one, and the middles of even cuts of [0.1, 1] times powers of ten.

    The packages make the cuts with fp32 `linspace`, whose last bits depend on the processor's
    vector width. Here they are the cuts without vectors: steps from 0.1 up in the first half, from
    1 down in the second, each operation rounded once.
    """
    exponents = bits - 1
    positive = []
    for place in range(exponents):
        cuts = 2 ** (place if signed else place + 1)
        start, end = torch.tensor(0.1, dtype=torch.float32), torch.tensor(1.0, dtype=torch.float32)
        step = (end - start) / torch.tensor(float(cuts), dtype=torch.float32)
        index = torch.arange(cuts + 1, dtype=torch.float32)
        edges = torch.where(index < (cuts + 1) // 2, start + step * index, end - step * (cuts - index))
        power = torch.tensor(10.0 ** (place - exponents + 1), dtype=torch.float32)
        positive.append(power * ((edges[:-1] + edges[1:]) / 2))
    magnitudes = torch.cat(positive)
    ends = torch.tensor([0.0, 1.0], dtype=torch.float32)
    return torch.cat((ends, magnitudes, -magnitudes) if signed else (ends, magnitudes)).sort()[0]


def _encode_table(levels: Tensor, ratio: Tensor) -> Tensor:
    """Pick the nearest level; a middle goes up."""
    below = (torch.searchsorted(levels, ratio.contiguous(), right=True) - 1).clamp(min=0)
    above = (below + 1).clamp(max=len(levels) - 1)
    low, high = levels[below], levels[above]
    return torch.where(ratio - low >= (high - low) * 0.5, above, below).int()


def _encode_geometric(bits: int, values: Tensor, scale: Tensor, random: Tensor | None) -> Tensor:
    top, base = scale.unbind(-1)
    steps = _ratio(values, top).double().log2() / base.double().log2()
    share = 0.5 if random is None else random.double() * 2.0**-32
    below_top = torch.where(base < 1.0, (steps + share).floor(), 0.0).clamp(0, 2**bits - 1)
    return torch.sub(2**bits - 1, below_top).int()


def _decode_geometric(bits: int, codes: Tensor, scale: Tensor) -> Tensor:
    top, base = scale.unbind(-1)
    level = torch.ones_like(codes, dtype=torch.float32)
    for code in range(2**bits - 2, -1, -1):
        level = torch.where(codes <= code, level * base, level)
    return torch.where(top > 0, level * top, 0.0)


def _low_quantile(blocks: Tensor, width: int | None) -> Tensor:
    """Tenth percentile of each block, interpolated linearly; padding zeros sort below and are skipped."""
    block = blocks.shape[-1]
    padding = torch.zeros(blocks.shape[-2], dtype=torch.float64, device=blocks.device)
    if width is not None:
        padding[-1:] = blocks.shape[-2] * block - width
    position = padding + QUANTILE * (block - 1 - padding)
    place = position.floor().long().expand(blocks.shape[:-1])[..., None]
    ordered = blocks.sort(-1).values
    low, high = ordered.gather(-1, place), ordered.gather(-1, (place + 1).clamp(max=block - 1))
    share = (position - position.floor()).float()[..., None]
    return (low + share * (high - low))[..., 0]


def _ratio(values: Tensor, scale: Tensor) -> Tensor:
    usable = scale > 0
    return torch.where(usable, values / torch.where(usable, scale, 1.0), 0.0)


def _divide(values: Tensor, by: int) -> Tensor:
    return values / torch.full_like(values, by)


def _root(values: Tensor) -> Tensor:
    return values.double().sqrt().float()
