"""A packed optimizer state: codes, scales, and the format that gives them meaning."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stquant.codecs.blocks import Grid
from stquant.codecs.curves import default_octaves
from stquant.codecs.format import Format, Octaves
from stquant.codecs.packing import packed_bytes
from stquant.kernels.backend import resolve
from stquant.kernels.reference import codec
from stquant.kernels.reference.pieces import PIECE, pieces, read, write_


@dataclass(slots=True)
class PackedState:
    """One state of one parameter.

    Attributes:
        format: The format.
        grid: The parameter's block grid.
        octaves: Placement of the levels of a LOG format, (0, 0) for others.
        codes: uint8 `[rows, bytes]`.
        scales: `[rows, blocks, *format.scale_parts]` of `format.scale_dtype`.
    """

    format: Format
    grid: Grid
    octaves: Octaves
    codes: Tensor
    scales: Tensor

    @classmethod
    def zeros(cls, format: Format, grid: Grid, device: torch.device | str = "cpu") -> PackedState:
        """Return a state of zeros: all codes and scales 0."""
        codes = torch.zeros(grid.rows, packed_bytes(grid.row, format.bits), dtype=torch.uint8, device=device)
        shape = (grid.rows, grid.blocks_per_row, *format.scale_parts)
        scales = torch.zeros(shape, dtype=format.scale_dtype, device=device)
        return cls(format, grid, default_octaves(format), codes, scales)

    @classmethod
    def encoded(cls, format: Format, values: Tensor, grid: Grid | int) -> PackedState:
        """Return the encoding of plain values, rounded to nearest, on a grid or in blocks of a size."""
        grid = Grid.of(values.shape, grid) if isinstance(grid, int) else grid
        state = cls.zeros(format, grid, values.device)
        resolve(None).encode_(state, values)
        return state

    def decode(self) -> Tensor:
        """Return the values, fp32, in the shape of what is held."""
        out = torch.empty(self.grid.shape, dtype=torch.float32, device=self.codes.device)
        return resolve(None).decode(self, out)

    def recode(self, format: Format) -> PackedState:
        """Return the same values in another format, rounded to nearest."""
        state = PackedState.zeros(format, self.grid, self.codes.device)
        resolve(None).recode_(self, state)
        return state

    def unpack(self) -> Tensor:
        """Return one uint8 code per element, in the shape of what is held."""
        codes = torch.empty(self.grid.shape, dtype=torch.uint8, device=self.codes.device)
        for piece in self.grid.pieces(PIECE):
            write_(codes, piece, codec.load_codes(self, piece))
        return codes

    @classmethod
    def pack(cls, format: Format, grid: Grid, octaves: Octaves, codes: Tensor, scales: Tensor) -> PackedState:
        """Return the state of plain codes, one per element, and scales `[..., blocks]`; both are copied."""
        state = cls.zeros(format, grid, codes.device)
        state.octaves = octaves
        state.scales.copy_(scales.reshape(state.scales.shape))
        for piece in pieces(grid, [codes]):
            codec.store_codes_(state, piece, read(codes, piece))
        return state

    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor that the state holds."""
        return self.codes, self.scales

    def to(self, device: torch.device | str) -> PackedState:
        """Return the state on `device`."""
        return self.with_tensors(self.codes.to(device), self.scales.to(device))

    def with_tensors(self, codes: Tensor, scales: Tensor) -> PackedState:
        """Return a state of the same format that holds other tensors."""
        return PackedState(self.format, self.grid, self.octaves, codes, scales)
