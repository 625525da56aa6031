"""`stquant doctor`: which backend serves what on this machine, and why."""

from __future__ import annotations

import platform
from dataclasses import asdict
from typing import Annotated

import torch
import typer
from rich.table import Table

import stquant
from stquant.cli import console
from stquant.kernels.backend import explain


def doctor(json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Say which kernels serve on this machine, and why."""
    backends = explain()
    versions = {"stquant": stquant.__version__, "torch": torch.__version__, "python": platform.python_version()}
    machine = {"processor": platform.machine(), "threads": torch.get_num_threads()}
    if json:
        console.print_json({**versions, **machine, "backends": [asdict(backend) for backend in backends]})
        return
    facts = ", ".join(f"{name} {value}" for name, value in {**versions, **machine}.items())
    console.out.print(facts, highlight=False)
    table = Table(box=None, pad_edge=False)
    for column in ("backend", "state", "serves", "why"):
        table.add_column(column)
    for backend in backends:
        state = "default" if backend.default else "available" if backend.available else "missing"
        table.add_row(backend.name, state, backend.serves, backend.why)
    console.out.print(table)
