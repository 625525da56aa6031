"""One measurement as a file: what was found, on what, with which versions."""

from __future__ import annotations

import functools
import json
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

_PACKAGES = (
    "stquant",
    "torch",
    "transformers",
    "mlxtend",
    "torchao",
    "bitsandbytes",
    "adam-mini",
    "flashoptim",
    "solow",
)
"""Those whose version a measurement depends on, as far as they are installed."""


def conditions() -> dict[str, Any]:
    """Return versions, machine and commit, for the head of a measurement."""
    return {
        "python": platform.python_version(),
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
        "machine": {"architecture": platform.machine(), "cpu": processor(), "threads": torch.get_num_threads()},
        "commit": _commit(),
    }


def processor() -> str:
    """Return the name of the processor as far as the system tells; virtual machines often give numbers only."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    found = dict(reversed([[part.strip() for part in line.split(":", 1)] for line in lines if ":" in line]))
    if "model name" not in found:
        return platform.processor() or platform.machine()
    return f"{found['model name']}, family {found.get('cpu family')}, model {found.get('model')}"


@functools.cache
def origin() -> dict[str, Any]:
    """Return processor and commit, for one of several runs of a measurement that may come from several machines."""
    return {"cpu": processor(), "commit": _commit()}


def write(path: Path, findings: dict[str, Any]) -> None:
    """Write findings with their conditions as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"conditions": conditions(), **findings}, indent=2) + "\n")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of the checkout that this runs from, with a mark if it was changed; None outside one."""
    here = Path(__file__).parent
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"], cwd=here, capture_output=True, text=True
        )
    except FileNotFoundError:
        return None
    return found.stdout.strip() or None if found.returncode == 0 else None
