"""Checkpoints that commands read: a file or a folder, and the place inside it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stquant.checkpoint import flattened, foreign
from stquant.errors import CheckpointError


def read(path: Path, entry: str, mapped: bool = False) -> Mapping[str, Any]:
    """Return the dict at a dotted place of a file."""
    return _descend(path, foreign.load(path, mapped), entry)


def read_optimizer(path: Path, entry: str) -> tuple[str, Mapping[str, Any]]:
    """Return where a file or a folder has the state dict of an optimizer, and that.

    Without `entry` it is the file itself, or the only one of its entries that is one; of a folder,
    tensors come without their data.
    """
    found = _read_folder(path) if path.is_dir() else foreign.load(path, mapped=True)
    if not entry and isinstance(found, Mapping) and not _is_optimizer(found):
        names = [str(name) for name, part in found.items() if _is_optimizer(part)]
        if len(names) > 1:
            raise CheckpointError(f"{path} has several optimizers; choose one with --entry: {', '.join(names)}")
        entry = names[0] if names else ""
    return entry, _descend(path, found, entry)


def _descend(path: Path, found: Any, entry: str) -> Mapping[str, Any]:
    for key in filter(None, entry.split(".")):
        if not isinstance(found, Mapping) or key not in found:
            has = ", ".join(map(str, found)) if isinstance(found, Mapping) else type(found).__name__
            raise CheckpointError(f"{path} has no entry {key!r}; it has {has}")
        found = found[key]
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{path} holds {type(found).__name__}, expected a dict")
    return flattened.nested(found) if flattened.is_flattened(found) else found


def _read_folder(path: Path) -> Mapping[str, Any]:
    from stquant.checkpoint import folders  # slow to import, and few commands read one

    return folders.read_shapes(path)


def _is_optimizer(found: Any) -> bool:
    return isinstance(found, Mapping) and ({"state", "param_groups"} <= found.keys() or flattened.is_flattened(found))
