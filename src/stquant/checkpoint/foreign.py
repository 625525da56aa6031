"""Optimizer states that other libraries wrote: bitsandbytes' and torchao's Adam variants.

bitsandbytes keeps `state1`, `state2` with a table and block maxima each, inside or outside of a
wrapping dict; torchao keeps tensor subclasses that own codes, scale and table. Both cut blocks
from the flattened parameter. Values are read with the file's own table; codes and scales carry
over unchanged where our format and our blocks are the same.
"""

from __future__ import annotations

import importlib
import pickle
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stquant.codecs import packing, recipes
from stquant.codecs.blocks import Grid
from stquant.codecs.format import Format
from stquant.errors import CheckpointError

BNB_WRAPPER = "__bnb_optimizer_quant_state__"
_BNB_PARTS = {"exp_avg": ("state1", "qmap1", "absmax1"), "exp_avg_sq": ("state2", "qmap2", "absmax2")}
_BNB_BLOCK = 256
_TABLE_TOLERANCE = 2.0**-20
"""The packages' tables differ by up to two units in the last place between processors."""


@dataclass(frozen=True, slots=True)
class Borrowed:
    """A packed state of another library.

    Attributes:
        codes: uint8, one per element, in the parameter's shape.
        scale: fp32 `[blocks]`, blocks cut from the flattened parameter.
        table: fp32, the values of the codes.
        block: Elements of a block; the last may be short.
    """

    codes: Tensor
    scale: Tensor
    table: Tensor
    block: int

    def decode(self) -> Tensor:
        """Return the fp32 values in the parameter's shape."""
        flat = self.table.float()[self.codes.flatten().int()]
        scale = self.scale.float().repeat_interleave(self.block)[: flat.numel()]
        return (flat * scale).reshape(self.codes.shape)

    def present(self, format: Format) -> dict[str, Any] | None:
        """Return the state as ours without re-encoding, or None if format or blocks differ."""
        grid = Grid.of(self.codes.shape, format.block)
        if format.block != self.block or grid.row % self.block or not _has_table(format, self.table):
            return None
        packed = packing.pack(self.codes.reshape(grid.rows, grid.row), format.bits, grid.block)
        return {
            "codes": packing.spread(packed, format.bits, grid.row, grid.block).view(self.codes.shape),
            "scales": self.scale.float().reshape(grid.scale_shape),
            "format": format.number,
            "block": format.block,
            "lo": 0,
            "log2_step": 0,
        }


def _has_table(format: Format, table: Tensor) -> bool:
    if format.name not in ("dynamic8", "udynamic8", "dynamic4", "linear4") or len(table) != 2**format.bits:
        return False
    return torch.allclose(recipes.table(format), table.float(), rtol=_TABLE_TOLERANCE, atol=0.0)


def load(path: Path, mapped: bool = False) -> Any:
    """Read a file with torch's safe loader; torchao's tensor classes need torchao installed.

    Args:
        path: The file.
        mapped: Leave tensors in the file until they are looked at, if its kind admits that.

    Raises:
        CheckpointError: The file is none of torch's, or holds objects that the loader refuses.
    """
    try:
        return _safe_load(path, mapped)
    except pickle.UnpicklingError as error:
        if "torchao." not in str(error):
            raise CheckpointError(
                f"{path} cannot be read with torch.load(weights_only=True): it is damaged or holds Python objects; "
                "save a plain state dict"
            ) from error
    except (RuntimeError, EOFError) as error:
        raise CheckpointError(f"{path} is not a checkpoint of torch.save ({error}); check the file") from error
    try:
        importlib.import_module("torchao.optim")  # registers its classes with the safe loader
    except ImportError as error:
        raise CheckpointError(
            f"{path} holds tensor classes of torchao, which is not installed; install the torchao it was written with"
        ) from error
    return _safe_load(path, mapped)


def _safe_load(path: Path, mapped: bool) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped and zipfile.is_zipfile(path))


def kind_of(states: Mapping[Any, Mapping[str, Any]]) -> str:
    """Return who wrote a file's states: "bitsandbytes", "torchao" or "torch"."""
    for state in states.values():
        if BNB_WRAPPER in state or "state1" in state:
            return "bitsandbytes"
        if any(type(value).__module__.startswith("torchao.") for value in state.values()):
            return "torchao"
    return "torch"


def adam_state(name: str, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return one parameter's state under torch's names; packed parts as `Borrowed`.

    Args:
        name: The parameter's name, for errors.
        state: Its state as torch, bitsandbytes or torchao wrote it.

    Raises:
        CheckpointError: It is not a state of Adam, or malformed; names the parameter.
    """
    if BNB_WRAPPER in state or "state1" in state:
        return _from_bitsandbytes(name, {**state, **state.get(BNB_WRAPPER, {})})
    return {key: _from_torchao(name, key, value) for key, value in state.items()}


def _from_bitsandbytes(name: str, state: Mapping[str, Any]) -> dict[str, Any]:
    used: set[str] = {"step", BNB_WRAPPER}
    found: dict[str, Any] = {"step": state.get("step", 0)}
    for key, (codes, table, scale) in _BNB_PARTS.items():
        if not isinstance(state.get(codes), Tensor):
            raise CheckpointError(
                f"parameter {name!r} has no {codes!r} of bitsandbytes; only its Adam and AdamW (two states) convert"
            )
        used |= {codes, table, scale}
        packed = state[codes].dtype is torch.uint8
        borrow = (name, key, state[codes], state.get(scale), state.get(table), _BNB_BLOCK)
        found[key] = _borrowed(*borrow) if packed else state[codes]
    if unknown := state.keys() - used:
        raise CheckpointError(
            f"parameter {name!r} has {', '.join(sorted(unknown))} of bitsandbytes, which Adam does not need; "
            "only Adam and AdamW without max_unorm convert"
        )
    return found


def _from_torchao(name: str, key: str, value: Any) -> Any:
    if not type(value).__module__.startswith("torchao."):
        return value
    if not hasattr(value, "qmap"):
        return value.dequantize().float()
    codes = value.codes
    if codes.shape != value.shape:  # two 4-bit codes a byte, the high half first
        codes = torch.stack((codes >> 4, codes & 15), -1).reshape(value.shape)
    return _borrowed(name, key, codes, value.scale, value.qmap, value.block_size)


def _borrowed(name: str, key: str, codes: Tensor, scale: Any, table: Any, block: int) -> Borrowed:
    blocks = -(-codes.numel() // block)
    if not isinstance(scale, Tensor) or tuple(scale.shape) != (blocks,):
        found = tuple(scale.shape) if isinstance(scale, Tensor) else type(scale).__name__
        raise CheckpointError(f"parameter {name!r}: block maxima of {key} are {found}, expected shape ({blocks},)")
    if not isinstance(table, Tensor) or table.ndim != 1 or (codes.numel() and int(codes.max()) >= len(table)):
        raise CheckpointError(f"parameter {name!r}: {key} has no table that covers its codes")
    return Borrowed(codes, scale, table, block)
