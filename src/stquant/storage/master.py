"""How 16-bit parameters are rounded, and the residual: the bits of a weight that bf16 cannot hold."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stquant.codecs.blocks import Grid
from stquant.codecs.packing import packed_bytes
from stquant.kernels.reference import codec
from stquant.kernels.reference.pieces import PIECE, pieces, read, write_

AUTO = "auto"
"""8 bits for bf16, stochastic rounding for fp16."""


def check_master_bits(master_bits: int | str | None) -> int | str | None:
    """Return `master_bits` if it is allowed.

    Raises:
        ValueError: It is not "auto", None, 0 to 8, or 16.
    """
    allowed = master_bits is None or master_bits == AUTO
    if not allowed and (isinstance(master_bits, bool) or master_bits not in (*range(9), 16)):
        raise ValueError(f'master_bits={master_bits!r} is not available; use "auto", None, 0 to 8, or 16')
    return master_bits


@dataclass(frozen=True, slots=True)
class WeightRounding:
    """How the new weight of a parameter is rounded.

    Attributes:
        residual_bits: Bits of the residual; 0 if there is none.
        stochastic: Whether what still does not fit is rounded stochastically.
        keeps_small_changes: Whether changes below half a unit in the last place survive.
    """

    residual_bits: int
    stochastic: bool
    keeps_small_changes: bool

    @classmethod
    def of(cls, name: str, dtype: torch.dtype, master_bits: int | str | None) -> WeightRounding:
        """Return the rounding of the parameter `name`.

        Raises:
            ValueError: An fp16 parameter was to get a residual.
        """
        if dtype not in (torch.bfloat16, torch.float16):
            return _EXACT
        if master_bits is None:
            return cls(0, stochastic=False, keeps_small_changes=False)
        if dtype is torch.bfloat16:
            bits = 8 if master_bits == AUTO else int(master_bits)
        elif master_bits in (AUTO, 0):
            bits = 0
        else:
            raise ValueError(
                f"parameter {name!r} is float16, which takes no residual: master_bits={master_bits}; "
                "use 0 (stochastic rounding), None (plain rounding), or bfloat16"
            )
        return cls(bits, stochastic=True, keeps_small_changes=True)


_EXACT = WeightRounding(0, stochastic=False, keeps_small_changes=True)


@dataclass(slots=True)
class PackedResidual:
    """Residuals of one parameter, `bits` each; zero stands for the bf16 weight itself.

    Attributes:
        bits: Bits of a residual, 1 to 16.
        grid: The parameter's block grid.
        codes: uint8 `[rows, bytes]`, two's complement.
    """

    bits: int
    grid: Grid
    codes: Tensor

    @classmethod
    def zeros(cls, bits: int, grid: Grid, device: torch.device | str = "cpu") -> PackedResidual:
        """Return residuals of zero."""
        codes = torch.zeros(grid.rows, packed_bytes(grid.row, bits), dtype=torch.uint8, device=device)
        return cls(bits, grid, codes)

    @classmethod
    def pack(cls, bits: int, grid: Grid, values: Tensor) -> PackedResidual:
        """Return int16 residuals, multiples of `2**(16 - bits)`, in packed form."""
        state = cls.zeros(bits, grid, values.device)
        for piece in pieces(grid, [values]):
            codec.store_residual_(state, piece, read(values, piece))
        return state

    def unpack(self) -> Tensor:
        """Return the residuals as int16, in the parameter's shape."""
        values = torch.empty(self.grid.shape, dtype=torch.int16, device=self.codes.device)
        for piece in self.grid.pieces(PIECE):
            write_(values, piece, codec.load_residual(self, piece))
        return values

    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor that the residual holds."""
        return (self.codes,)

    def to(self, device: torch.device | str) -> PackedResidual:
        """Return the residual on `device`."""
        return self.with_tensors(self.codes.to(device))

    def with_tensors(self, codes: Tensor) -> PackedResidual:
        """Return a residual of the same bits that holds another tensor."""
        return PackedResidual(self.bits, self.grid, codes)
