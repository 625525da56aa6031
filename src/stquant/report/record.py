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
        "machine": {"architecture": platform.machine(), "cpu": _cpu(), "threads": torch.get_num_threads()},
        "commit": _commit(),
    }


@functools.cache
def origin() -> dict[str, Any]:
    """Return processor and commit, for one of several runs of a measurement that may come from several machines."""
    return {"cpu": _cpu(), "commit": _commit()}


def write(path: Path, findings: dict[str, Any]) -> None:
    """Write findings with their conditions as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"conditions": conditions(), **findings}, indent=2) + "\n")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


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
