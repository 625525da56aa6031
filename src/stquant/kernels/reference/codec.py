"""Packed states and plain tensors: encode, decode, recode, and the same for one piece."""

from __future__ import annotations

import torch
from torch import Tensor

from stquant.codecs import blocks, curves, packing, residual
from stquant.codecs.blocks import Piece
from stquant.kernels.ops import Packed, PackedResidual
from stquant.kernels.reference.pieces import PIECE, pieces, read, write_


def decode(state: Packed, out: Tensor) -> Tensor:
    """Decode a packed state.

    Args:
        state: The state.
        out: Floating tensor of the parameter's shape, any strides; receives the values.

    Returns:
        `out`.
    """
    for piece in pieces(state.grid, [out]):
        write_(out, piece, load(state, piece))
    return out


def encode_(state: Packed, values: Tensor) -> None:
    """Overwrite a packed state with the encoding of plain values, rounded to nearest.

    Args:
        state: The state; its format and octaves decide, its codes and scales are overwritten.
        values: Floating tensor of the parameter's shape, any strides. Non-finite values count as
            zero; for a non-negative state negative ones do, too.
    """
    for piece in pieces(state.grid, [values]):
        plain = read(values, piece).float()
        _encode_piece_(state, piece, torch.where(plain.isfinite(), plain, 0.0))


def recode_(source: Packed, target: Packed) -> None:
    """Overwrite `target` with the values of `source`, rounded to nearest.

    Between two LOG formats of one grid the block means move over exactly and only the levels are
    rounded.
    """
    keeps_means = source.format.averaged and target.format.averaged and source.grid == target.grid
    for piece in source.grid.pieces(PIECE):
        values = load(source, piece)
        if keeps_means:
            store_mean_(target, piece, values, source.scales[piece.rows, piece.blocks])
        else:
            _encode_piece_(target, piece, values)


def load(state: Packed, piece: Piece) -> Tensor:
    """Decode one piece to fp32 `[rows, width]`."""
    codes = load_codes(state, piece)
    scales = state.scales[piece.rows, piece.blocks].float()
    values = curves.decode(state.format, blocks.to_blocks(codes, state.grid.block), scales[:, :, None], state.octaves)
    return blocks.from_blocks(values, piece.width)


def load_codes(state: Packed, piece: Piece) -> Tensor:
    """Unpack the codes of one piece, int32 `[rows, width]`."""
    bits = state.format.bits
    return packing.unpack(state.codes[piece.rows, piece.packed(bits)], bits, piece.width, state.grid.block)


def store_codes_(state: Packed, piece: Piece, codes: Tensor) -> None:
    """Pack the codes of one piece `[rows, width]`."""
    bits = state.format.bits
    state.codes[piece.rows, piece.packed(bits)] = packing.pack(codes, bits, state.grid.block)


def store_values_(state: Packed, piece: Piece, values: Tensor, random: Tensor | None = None) -> Tensor:
    """Encode finite fp32 values into a piece of a state whose scales are taken from the values.

    Returns:
        What the values decode to.
    """
    cut = blocks.to_blocks(values, state.grid.block)
    scales = curves.block_scale(state.format, cut, piece.width)
    return _store_(state, piece, cut, scales, random)


def store_mean_(state: Packed, piece: Piece, values: Tensor, mean: Tensor, random: Tensor | None = None) -> Tensor:
    """Encode non-negative values into a piece of a LOG state whose block means are known."""
    return _store_(state, piece, blocks.to_blocks(values, state.grid.block), mean, random)


def load_residual(state: PackedResidual, piece: Piece) -> Tensor:
    """Unpack one piece of a residual, int16 `[rows, width]`."""
    packed = state.codes[piece.rows, piece.packed(state.bits)]
    return residual.from_codes(packing.unpack(packed, state.bits, piece.width, state.grid.block), state.bits)


def store_residual_(state: PackedResidual, piece: Piece, values: Tensor) -> None:
    """Pack int16 residuals `[rows, width]` into a piece."""
    codes = residual.to_codes(values, state.bits)
    state.codes[piece.rows, piece.packed(state.bits)] = packing.pack(codes, state.bits, state.grid.block)


def _encode_piece_(state: Packed, piece: Piece, values: Tensor) -> None:
    if not state.format.signed:
        values = values.clamp(min=0.0)
    if not state.format.averaged:
        store_values_(state, piece, values)
        return
    mean = blocks.block_mean(blocks.to_blocks(values, state.grid.block), piece.width)
    store_mean_(state, piece, values, mean)


def _store_(state: Packed, piece: Piece, cut: Tensor, scales: Tensor, random: Tensor | None) -> Tensor:
    noise = None if random is None else blocks.to_blocks(random, state.grid.block)
    codes = curves.encode(state.format, cut, scales[:, :, None], state.octaves, noise)
    stored = scales
    if state.scales.dtype is torch.float16:
        stored = scales.clamp(max=torch.finfo(torch.float16).max).half()
    decoded = curves.decode(state.format, codes, stored.float()[:, :, None], state.octaves)
    state.scales[piece.rows, piece.blocks] = stored
    store_codes_(state, piece, blocks.from_blocks(codes, piece.width))
    return blocks.from_blocks(decoded, piece.width)
