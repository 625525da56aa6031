"""Codes to bytes and back: no bit is wasted at any width.

Eight codes that lie a stride apart share a *lane*: `bits` bytes. The lanes of a block lie side by
side, one byte plane after the other. A full block of 128 codes has 16 lanes of stride 16:

    lane l holds the codes of elements  l, l+16, l+32, ..., l+112
    as the little-endian integer        code[l] | code[l+16] << bits | code[l+32] << 2*bits | ...

    bytes of a block (3 bits):   plane 0: lanes 0..15 | plane 1: lanes 0..15 | plane 2: lanes 0..15

So a SIMD kernel loads a plane with one instruction and reaches code j of all lanes by a constant
shift. The last block of a row may be short; its n codes take ceil(n / 8) lanes in the same way,
so that at most 7 codes of a row are padding (zero bits).

`spread` shows packed rows at a size that does not depend on the width, for files.
"""

from __future__ import annotations

import torch
from torch import Tensor

CODES_PER_LANE = 8


def lanes(elements: int) -> int:
    """Lanes that a run of codes takes."""
    return -(-elements // CODES_PER_LANE)


def packed_bytes(row: int, bits: int) -> int:
    """Bytes of a row of `row` codes, whatever its blocks: these are multiples of a lane."""
    return bits * lanes(row)


def pack(codes: Tensor, bits: int, block: int) -> Tensor:
    """Pack rows of codes.

    Args:
        codes: Integers below `2**bits`, `[rows, row]`; any integer dtype.
        bits: Width of a code, 0 to 16.
        block: Elements of a full block, a multiple of 8.

    Returns:
        uint8 `[rows, packed_bytes(row, bits)]`.
    """
    rows, row = codes.shape
    full = row // block * block
    body = _pack_run(codes[:, :full].reshape(rows, full // block, block), bits)
    if full == row:
        return body.reshape(rows, row * bits // CODES_PER_LANE)
    tail = torch.nn.functional.pad(codes[:, full:], (0, lanes(row - full) * CODES_PER_LANE - (row - full)))
    return torch.cat((body.reshape(rows, full * bits // 8), _pack_run(tail, bits)), dim=1)


def unpack(packed: Tensor, bits: int, row: int, block: int) -> Tensor:
    """Return the codes of packed rows as int32 `[rows, row]`; the inverse of `pack`."""
    rows = packed.shape[0]
    full = row // block * block
    split = full * bits // 8
    body = _unpack_run(packed[:, :split].reshape(rows, full // block, block * bits // 8), bits, block)
    if full == row:
        return body.reshape(rows, row)
    tail = _unpack_run(packed[:, split:], bits, lanes(row - full) * CODES_PER_LANE)
    return torch.cat((body.reshape(rows, full), tail[:, : row - full]), dim=1)


def spread(packed: Tensor, bits: int, row: int, block: int, room: int = 1) -> Tensor:
    """Show packed rows at a size that does not depend on the width.

    Each block has `room` bytes per element and begins with its packed codes; what is left is 0 and
    compresses to next to nothing. A short block whose lanes do not fit holds a code per element.

    Args:
        packed: uint8 `[rows, packed_bytes(row, bits)]`.
        bits: Width of a code, at most `8 * room`.
        row: Elements of a row.
        block: Elements of a full block.
        room: Bytes per element, 1 or 2.

    Returns:
        uint8 `[rows, room * row]`.
    """
    rows, full, split = packed.shape[0], row // block, row // block * block * bits // CODES_PER_LANE
    shown = packed.new_zeros(rows, row * room)
    body = shown[:, : full * block * room].view(rows, full, block * room)
    body[..., : block * bits // CODES_PER_LANE] = packed[:, :split].view(rows, full, block * bits // CODES_PER_LANE)
    tail, left = packed[:, split:], row - full * block
    if tail.shape[1] > left * room:
        codes = _unpack_run(tail, bits, lanes(left) * CODES_PER_LANE)[:, :left]
        tail = torch.stack([codes >> 8 * place & 0xFF for place in range(room)], -1).to(torch.uint8).flatten(1)
    start = full * block * room
    shown[:, start : start + tail.shape[1]] = tail
    return shown


def gather(shown: Tensor, bits: int, row: int, block: int, room: int = 1) -> Tensor:
    """Return the packed rows that `spread` has shown, and drop everything else."""
    rows, full, left = shown.shape[0], row // block, row % block
    start, size = full * block * room, bits * lanes(left)
    body = shown[:, :start].reshape(rows, full, block * room)[..., : block * bits // CODES_PER_LANE]
    tail = shown[:, start : start + size]
    if size > left * room:
        parts = shown[:, start:].reshape(rows, left, room).int()
        codes = (parts << 8 * torch.arange(room, device=parts.device)).sum(-1) & ((1 << bits) - 1)
        tail = _pack_run(torch.nn.functional.pad(codes, (0, lanes(left) * CODES_PER_LANE - left)), bits)
    return torch.cat((body.reshape(rows, full * block * bits // CODES_PER_LANE), tail), dim=1)


def _pack_run(codes: Tensor, bits: int) -> Tensor:
    """Pack runs `[..., 8 * lanes]` into `[..., bits * lanes]`."""
    lane = codes.int().reshape(*codes.shape[:-1], CODES_PER_LANE, codes.shape[-1] // CODES_PER_LANE)
    planes = []
    for plane in range(bits):
        byte = torch.zeros_like(lane[..., 0, :])
        for j in range(CODES_PER_LANE):
            shift = bits * j - 8 * plane
            if -bits < shift < 8:
                byte |= lane[..., j, :] << shift if shift >= 0 else lane[..., j, :] >> -shift
        planes.append((byte & 0xFF).to(torch.uint8))
    if not planes:
        return codes.new_empty((*codes.shape[:-1], 0), dtype=torch.uint8)
    return torch.cat(planes, dim=-1)


def _unpack_run(packed: Tensor, bits: int, elements: int) -> Tensor:
    """Unpack runs `[..., bits * lanes]` into int32 codes `[..., elements]`."""
    if bits == 0:
        return packed.new_zeros((*packed.shape[:-1], elements), dtype=torch.int32)
    planes = packed.int().reshape(*packed.shape[:-1], bits, elements // CODES_PER_LANE)
    codes = []
    for j in range(CODES_PER_LANE):
        code = torch.zeros_like(planes[..., 0, :])
        for plane in range(bits):
            shift = bits * j - 8 * plane
            if -bits < shift < 8:
                code |= planes[..., plane, :] >> shift if shift >= 0 else planes[..., plane, :] << -shift
        codes.append(code & ((1 << bits) - 1))
    return torch.cat(codes, dim=-1)
