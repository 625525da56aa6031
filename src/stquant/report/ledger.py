"""Who costs what: bytes and bits of every state of every parameter."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from stquant.checkpoint.schema import CONTROL
from stquant.distributed.tensors import local
from stquant.report.memory import held_bytes
from stquant.storage.master import PackedResidual
from stquant.storage.packed import PackedState


@dataclass(frozen=True, slots=True)
class Row:
    """One state of one parameter.

    Attributes:
        parameter: The parameter's name.
        state: The state's name.
        shape: The parameter's shape.
        elements: Elements that the state describes on this rank; 0 for `step` and `control`.
        format: Name of the format.
        bytes: Bytes that the state's storages hold: codes, scales and padding.
        reason: Why the state is not packed, or empty.
    """

    parameter: str
    state: str
    shape: tuple[int, ...]
    elements: int
    format: str
    bytes: int
    reason: str = ""

    @property
    def bits(self) -> float:
        """True bits per element, scales and padding included."""
        return 8 * self.bytes / self.elements if self.elements else 0.0


@dataclass(frozen=True, slots=True)
class Ledger:
    """What the states of an optimizer cost; `str()` of it is a table.

    Attributes:
        rows: One for each state of each parameter, in the order of the parameters.
    """

    rows: Sequence[Row]

    @property
    def parameters(self) -> int:
        """Number of parameter elements that have states."""
        return sum({row.parameter: row.elements for row in self.rows if row.elements}.values())

    @property
    def bytes(self) -> int:
        """Bytes of all states, residuals, step counts and the numbers of adaptive policies."""
        return sum(row.bytes for row in self.rows)

    @property
    def residual_bytes(self) -> int:
        """Bytes of the residuals of bf16 parameters, a part of `bytes`."""
        return sum(row.bytes for row in self.rows if row.state == "residual")

    @property
    def bits(self) -> float:
        """Average true bits per state element, residuals apart, fp32 leftovers included."""
        rows = [row for row in self.rows if row.state != "residual"]
        elements = sum(row.elements for row in rows)
        return 8 * sum(row.bytes for row in rows if row.elements) / elements if elements else 0.0

    @property
    def bytes_per_parameter(self) -> float:
        """`bytes` per parameter element."""
        return self.bytes / self.parameters if self.parameters else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return totals and rows as plain numbers, strings, lists and dicts."""
        names = ("parameters", "bytes", "residual_bytes", "bits", "bytes_per_parameter")
        rows = [{field: getattr(row, field) for field in (*Row.__dataclass_fields__, "bits")} for row in self.rows]
        return {**{name: getattr(self, name) for name in names}, "rows": rows}

    def __str__(self) -> str:
        if not self.rows:
            return "no state yet: call step() or init_state()"
        return _render(self)


def rows_of(name: str, param: Tensor, state: Mapping[str, Any], reasons: Mapping[str, str]) -> Iterator[Row]:
    """Yield the rows of one parameter's live state.

    Args:
        name: The parameter's name.
        param: The parameter.
        state: Its live state.
        reasons: Why states are not packed, by state.
    """
    shape, elements = tuple(param.shape), local(param).numel()
    for key, value in state.items():
        if isinstance(value, PackedState):
            yield Row(name, key, shape, elements, value.format.name, held_bytes(value.tensors()))
        elif isinstance(value, PackedResidual):
            yield Row(name, key, shape, elements, f"residual{value.bits}", held_bytes(value.tensors()))
        elif isinstance(value, Tensor):
            described = 0 if key in ("step", CONTROL) else elements
            format = str(value.dtype).removeprefix("torch.").replace("float", "fp")
            reason = "" if not described else reasons.get(key) or "loaded so"
            yield Row(name, key, shape, described, format, held_bytes([value]), reason)


def _render(ledger: Ledger) -> str:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="optimizer states", title_justify="left", box=None, pad_edge=False)
    for column in ("parameter", "shape", "state", "format", "bits", "bytes", "not packed because"):
        table.add_column(column, justify="right" if column in ("bits", "bytes") else "left", no_wrap=True)
    for row in ledger.rows:
        bits = f"{row.bits:.3f}" if row.elements else ""
        shape = "x".join(map(str, row.shape)) or "scalar"
        table.add_row(row.parameter, shape, row.state, row.format, bits, f"{row.bytes:,}", row.reason)
    text = io.StringIO()
    Console(file=text, width=160, color_system=None).print(table)
    total = (
        f"{ledger.bytes:,} bytes for {ledger.parameters:,} parameters: {ledger.bytes_per_parameter:.3f} bytes per "
        f"parameter, {ledger.bits:.3f} true bits per state element"
    )
    residual = f", {ledger.residual_bytes:,} bytes of them residuals" if ledger.residual_bytes else ""
    lines = [line.rstrip() for line in text.getvalue().splitlines()]
    return "\n".join([*lines, "", total + residual])
