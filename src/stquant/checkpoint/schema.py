"""Names, versions and checks of what a state dict holds.

A presented state consists of tensors, numbers and dicts only, and its shapes do not depend on the
bit-width: codes are one uint8 per element in the parameter's shape, residuals two, of which each
block uses the first ones; see `codecs.packing.spread`. A fresh optimizer that starts at other
widths can therefore receive any file, whoever loads it. The packed form, for plain files, replaces
these by the bytes of the live state and the parameter's shape.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stquant.codecs import catalog
from stquant.codecs.blocks import Grid
from stquant.codecs.format import Family, Format, Octaves
from stquant.codecs.packing import packed_bytes
from stquant.distributed import tensors
from stquant.errors import CheckpointError, FormatError
from stquant.policy import policies
from stquant.policy.policies import Policy
from stquant.storage.packed import PackedState

GROUP_KEY = "stquant"
"""The one key of a parameter group that is ours: a JSON string, see `GroupConfig`."""

CONTROL = "control"
"""State of a parameter that an adaptive policy keeps: fp32 `[states, 10]`, see `optim.pools`."""

VERSION = 1


@dataclass(frozen=True, slots=True)
class GroupConfig:
    """What a parameter group says beyond torch's hyperparameters.

    Attributes:
        policy: Chooses the formats of the group's states.
        master_bits: Bits of the residual of bf16 parameters, "auto", or None.
        seed: Seed of stochastic rounding.
        shared: Whether the policy, and with it a budget, is that of the whole optimizer.
        averages: Moving averages of an adaptive policy, see `policy.factors.Averages`.
    """

    policy: Policy
    master_bits: int | str | None
    seed: int
    shared: bool = True
    averages: tuple[float, float] = (0.0, 0.0)

    def __str__(self) -> str:
        return f"{self.policy}, master_bits={self.master_bits!r}, seed={self.seed}"

    def dump(self) -> str:
        """Return the JSON string that stands in the group."""
        data = {
            "version": VERSION,
            "policy": self.policy.to_dict(),
            "master_bits": self.master_bits,
            "seed": self.seed,
        }
        if hasattr(self.policy, "ladder"):
            data |= {"shared": self.shared, "averages": self.averages}
        return json.dumps(data)


@functools.lru_cache(maxsize=64)
def read_group(text: str) -> GroupConfig:
    """Return the configuration that a group's JSON string holds.

    Raises:
        CheckpointError: It is not ours, or of a later version.
    """
    try:
        data = json.loads(text)
        if data["version"] > VERSION:
            raise CheckpointError(
                f"the file has schema version {data['version']}, this version reads up to {VERSION}; update stquant"
            )
        averages = data.get("averages", (0.0, 0.0))
        return GroupConfig(
            policies.from_dict(data["policy"]),
            data["master_bits"],
            data["seed"],
            bool(data.get("shared", True)),
            (float(averages[0]), float(averages[1])),
        )
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"group key {GROUP_KEY!r} cannot be read ({error}): {text!r}") from error


class Reader:
    """Takes checked parts out of one parameter's presented state; errors name the parameter."""

    def __init__(self, name: str, param: Tensor) -> None:
        self.name = name
        self.shape = param.shape
        self._param = param

    def fail(self, problem: str) -> CheckpointError:
        """Return the error to raise; `problem` says what was found and what is expected."""
        return CheckpointError(f"parameter {self.name!r}: {problem}; nothing was loaded")

    def tensor(
        self, where: str, value: Any, dtype: torch.dtype | None, shape: tuple[int, ...], grid: Grid | None = None
    ) -> Tensor:
        """Return this rank's part of a tensor of this dtype (None: any floating dtype) and whole shape.

        With a grid, `shape` is that of its scales.
        """
        self._check(where, value, dtype, shape)
        return tensors.unwrap(value, self._param, grid)

    def small(self, where: str, value: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor of this dtype and shape that every rank has whole, however the parameter is spread."""
        self._check(where, value, dtype, shape)
        checked: Tensor = value
        return checked

    def _check(self, where: str, value: Any, dtype: torch.dtype | None, shape: tuple[int, ...]) -> None:
        if not isinstance(value, Tensor):
            raise self.fail(f"{where} is {type(value).__name__}, expected a tensor")
        if tuple(value.shape) != shape:
            raise self.fail(f"{where} has shape {tuple(value.shape)}, expected {shape}")
        if value.dtype is not dtype and not (dtype is None and value.is_floating_point()):
            raise self.fail(f"{where} has dtype {value.dtype}, expected {dtype or 'a floating dtype'}")

    def part(self, where: str, state: Mapping[str, Any], key: str) -> Any:
        """Return one entry of a presented state."""
        if key not in state:
            raise self.fail(f"{where} lacks {key!r}")
        return state[key]

    def number(self, where: str, value: Any, low: int, high: int) -> int:
        """Return an integer within bounds; a one-element tensor counts as its value."""
        plain = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        if isinstance(plain, bool) or not isinstance(plain, int | float) or plain != int(plain):
            raise self.fail(f"{where} is {plain!r}, expected an integer")
        if not low <= plain <= high:
            raise self.fail(f"{where} is {plain}, expected {low} to {high}")
        return int(plain)

    def format(self, where: str, state: Mapping[str, Any], signed: bool) -> Format:
        """Return the format that a presented state names."""
        number = self.number(f"{where}.format", self.part(where, state, "format"), 0, 1 << 30)
        block = self.number(f"{where}.block", self.part(where, state, "block"), 0, 1 << 30)
        try:
            format = catalog.from_number(number, block)
        except FormatError as error:
            raise self.fail(f"{where}: {error}") from error
        if not format.packed or format.signed != signed:
            raise self.fail(f"{where} has format {format.name!r}, which does not fit this state")
        return format

    def octaves(self, where: str, state: Mapping[str, Any], format: Format) -> Octaves:
        """Return the placement of a LOG state's levels."""
        lo = self.number(f"{where}.lo", self.part(where, state, "lo"), -64, 64)
        step = self.number(f"{where}.log2_step", self.part(where, state, "log2_step"), -20, 1)
        return Octaves(lo, step)

    def check_codes(self, where: str, state: PackedState) -> None:
        """Raise if a state has codes that its format does not produce."""
        format = state.format
        never = {Family.MULAW: 2 ** (format.bits - 1), Family.SOFTSIGN: 255}.get(format.family)
        if never is not None and state.grid.elements and bool((state.unpack() == never).any()):
            kind = "a negative zero" if format.family is Family.MULAW else str(never)
            raise self.fail(f"{where}.codes holds {kind}, which {format.name!r} never writes")

    def packed(self, where: str, state: Mapping[str, Any], bits: int, grid: Grid) -> Tensor:
        """Return packed codes of a parameter of this shape."""
        shape = self.part(where, state, "shape")
        if not isinstance(shape, list | tuple) or tuple(shape) != tuple(self.shape):
            raise self.fail(f"{where}.shape is {shape!r}, expected {list(self.shape)}")
        size = (grid.rows, packed_bytes(grid.row, bits))
        return self.tensor(f"{where}.packed", self.part(where, state, "packed"), torch.uint8, size)

    def scales(self, where: str, state: Mapping[str, Any], format: Format, grid: Grid) -> Tensor:
        """Return scales of the right sign, all finite."""
        shape = (*grid.whole.scale_shape, *format.scale_parts)
        scales = self.tensor(f"{where}.scales", self.part(where, state, "scales"), format.scale_dtype, shape, grid)
        if not bool(scales.isfinite().all()):
            raise self.fail(f"{where}.scales holds non-finite values")
        if format.family is not Family.DYNAMIC and bool((scales < 0).any()):
            raise self.fail(f"{where}.scales holds negative values")
        return scales
