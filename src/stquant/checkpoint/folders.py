"""Folders of `torch.distributed.checkpoint`: what is in them, without their tensors' data.

Any number of ranks may have written one; no process group is needed to look at it. torch's reader
unpickles metadata and numbers, so only folders from a source that you trust should be read.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from stquant.errors import CheckpointError


def read_shapes(path: Path) -> dict[str, Any]:
    """Return the nested dict that was saved; tensors of a dimension or more are on the meta device.

    Raises:
        CheckpointError: The folder is none of torch's distributed checkpoints.
    """
    if not (path / ".metadata").exists():
        raise CheckpointError(f"{path} is a folder without .metadata, so no checkpoint of torch.distributed.checkpoint")
    metadata = FileSystemReader(path).read_metadata()
    entries: dict[str, Any] = {}
    for key, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            device = "meta" if len(entry.size) else "cpu"
            entries[key] = torch.empty(entry.size, dtype=entry.properties.dtype, device=device)
        else:
            entries[key] = None
    small = {key: value for key, value in entries.items() if value is None or value.device.type == "cpu"}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # that is what no_dist asks for
        load(small, storage_reader=FileSystemReader(path), no_dist=True)
    paths = metadata.planner_data or {}
    nested: dict[Any, Any] = {}
    for key, value in {**entries, **small}.items():
        _put(nested, paths.get(key, (key,)), value)
    return {key: _with_lists(value, key == "param_groups") for key, value in nested.items()}


def _put(nested: dict[Any, Any], path: Sequence[Any], value: Any) -> None:
    for part in path[:-1]:
        nested = nested.setdefault(part, {})
    nested[path[-1]] = value


def _with_lists(value: Any, is_groups: bool = False) -> Any:
    """Turn the groups, which lie at numbers, into a list again; other numbers are keys of dicts."""
    if not isinstance(value, Mapping):
        return value
    if is_groups:
        return [_with_lists(value[number]) for number in sorted(value)]
    return {key: _with_lists(part, key == "param_groups") for key, part in value.items()}
