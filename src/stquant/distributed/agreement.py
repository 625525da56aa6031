"""Agreement between ranks: the same statistics everywhere, so that all ranks decide alike.

Integers add up exactly in any order. A parameter's statistics are combined over the mesh
dimensions that shard it and over no other: replicas have the same numbers already. Parameters that
are spread alike share a bucket, one small tensor, and every rank works through the same buckets in
the same order, whatever gradients it has. Decisions themselves are made elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from stquant.errors import AgreementError

_CHUNK = 1 << 20


def reduce_stats(
    entries: Sequence[tuple[Tensor, Tensor]],
    *,
    maxima: int = 0,
    process_group: dist.ProcessGroup | None = None,
) -> list[Tensor]:
    """Combine local statistics to those of whole parameters.

    Every rank has to call this with the same parameters in the same order. Each bucket takes one
    collective per mesh dimension that shards it, and a second one if there are maxima.

    Args:
        entries: Pairs of a parameter and an int64 vector of statistics of this rank's part of it.
            A part without elements has zeros as sums.
        maxima: So many numbers at the end of every vector are combined by their maximum, all
            others are added.
        process_group: For plain parameters, which are taken to be held whole. None: their
            numbers stay as they are. A group of replicas: they become those of its first rank,
            so that replicas agree even if their gradients do not.

    Returns:
        The combined vectors, int64, in the order of `entries`, on the devices of the given ones.
    """
    combined: list[Tensor] = [vector for _, vector in entries]
    for bucket, members in _buckets([param for param, _ in entries]).items():
        flat = [combined[i] for i in members]
        if bucket is None:
            if process_group is None:
                continue
            values = torch.cat(flat)
            dist.broadcast(values, group=process_group, group_src=0)
        else:
            values = _reduce(torch.cat(flat).to(bucket.mesh.device_type), flat, maxima, bucket)
        for i, part in zip(members, torch.split(values, [len(vector) for vector in flat]), strict=True):
            combined[i] = part.to(combined[i].device)
    return combined


class Part(NamedTuple):
    """What one rank has to say of a parameter.

    Attributes:
        name: The parameter's name, for errors.
        param: The parameter.
        values: int64 numbers of this rank's part of it, of any shape.
        known: Whether this rank has any; else `values` is zeros of the same shape.
    """

    name: str
    param: Tensor
    values: Tensor
    known: bool


def sum_parts(parts: Sequence[Part], process_group: dist.ProcessGroup | None = None) -> list[Tensor | None]:
    """Add up what all holders of parts of parameters know; see `reduce_stats`.

    Returns:
        The sums, None for a parameter of which no rank knows anything.

    Raises:
        AgreementError: Some holders of a parameter know something and others do not, so that they
            do not count its steps alike. All of them raise.
    """
    whole = process_group is None
    shared = [place for place, part in enumerate(parts) if not whole or isinstance(part.param, DTensor)]
    sums = [part.values if part.known else None for part in parts]
    entries = []
    for place in shared:
        values = parts[place].values
        entries.append((parts[place].param, torch.cat([values.flatten(), values.new_tensor([parts[place].known, 1])])))
    for place, total in zip(shared, reduce_stats(entries, process_group=process_group), strict=True):
        knowing, holders = total[-2:].tolist()
        if 0 < knowing < holders:
            raise AgreementError(
                f"parameter {parts[place].name!r} was measured on {knowing} of {holders} ranks that share it: the "
                "others had no gradient for it in this step or an earlier one; give all ranks of its mesh gradients "
                "for the same parameters, zeros if need be"
            )
        sums[place] = total[:-2].view_as(parts[place].values) if knowing else None
    return sums


def on_any_rank(params: Iterable[Tensor], here: bool) -> bool:
    """Say whether something is so on any of the ranks that share distributed parameters.

    Every rank of their meshes has to call this. Plain parameters take no part: without others the
    answer is `here`.
    """
    meshes = list(dict.fromkeys(param.device_mesh for param in params if isinstance(param, DTensor)))
    for mesh in meshes + meshes[-2::-1]:  # and back, for those that share the first mesh only
        flag = torch.tensor([here], dtype=torch.int64, device=mesh.device_type)
        for dim in range(mesh.ndim):
            if mesh.size(dim) > 1:
                dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=mesh.get_group(dim))
        here = bool(flag)
    return here


class Replicas:
    """A process group that an optimizer keeps; copies of the optimizer share it, files cannot hold it."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise ValueError(
                f"process_group={group!r} is no process group; use for example torch.distributed.group.WORLD"
            )
        self.group = group

    def __deepcopy__(self, memo: dict[int, object]) -> Replicas:
        return self

    def __reduce__(self) -> tuple[type[Replicas], tuple[None]]:
        if self.group is not None:
            raise TypeError("an optimizer with process_group= cannot be pickled; save its state_dict()")
        return Replicas, (None,)


def check_replicas(
    entries: Iterable[tuple[str, Tensor, Sequence[Tensor]]], process_group: dist.ProcessGroup | None = None
) -> None:
    """Raise if replicas of a parameter or of its states are not equal to the bit; for debugging.

    Reads everything once and takes a collective per mesh dimension that replicates parameters, so
    every rank has to call it.

    Args:
        entries: Name, parameter, and the local tensors that have to be equal on its replicas.
        process_group: Replicas of plain parameters; None does not compare those.

    Raises:
        AgreementError: Replicas differ; names the parameters. Every rank that compares them raises.
    """
    listed = list(entries)
    differing: list[str] = []
    for bucket, members in _buckets([param for _, param, _ in listed], replicated=True).items():
        if bucket is None and process_group is None:
            continue
        prints = torch.tensor([_fingerprint(listed[i][2]) for i in members], dtype=torch.int64)
        groups = [process_group] if bucket is None else [bucket.mesh.get_group(dim) for dim in bucket.dims]
        both = torch.cat([prints, -1 - prints]).to("cpu" if bucket is None else bucket.mesh.device_type)
        for group in groups:
            dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
        highest, lowest = both.cpu()[: len(prints)], -1 - both.cpu()[len(prints) :]
        differing += [listed[i][0] for i, differs in zip(members, (highest != lowest).tolist(), strict=True) if differs]
    if differing:
        raise AgreementError(
            f"replicas of {', '.join(map(repr, differing))} differ; they must see equal gradients and start equal: "
            "check that gradients are averaged before step() and that all ranks loaded the same checkpoint"
        )


class _Bucket(NamedTuple):
    """Parameters of one mesh that are spread over the same of its dimensions."""

    mesh: DeviceMesh
    dims: tuple[int, ...]


def _buckets(params: Sequence[Tensor], replicated: bool = False) -> dict[_Bucket | None, list[int]]:
    """Group parameters by how they are spread; None stands for plain ones. In order of appearance."""
    buckets: dict[_Bucket | None, list[int]] = {}
    for i, param in enumerate(params):
        bucket = None
        if isinstance(param, DTensor):
            mesh = param.device_mesh
            dims = tuple(
                dim
                for dim, placement in enumerate(param.placements)
                if isinstance(placement, Replicate) is replicated and mesh.size(dim) > 1
            )
            bucket = _Bucket(mesh, dims)
        buckets.setdefault(bucket, []).append(i)
    return buckets


def _reduce(values: Tensor, vectors: Sequence[Tensor], maxima: int, bucket: _Bucket) -> Tensor:
    largest = torch.cat([torch.arange(len(v), device=values.device) >= len(v) - maxima for v in vectors])
    sums, highest = values[~largest], values[largest]
    for dim in bucket.dims:
        group = bucket.mesh.get_group(dim)
        if sums.numel():
            dist.all_reduce(sums, group=group)
        if highest.numel():
            dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    values[~largest], values[largest] = sums, highest
    return values


def _fingerprint(tensors: Sequence[Tensor]) -> int:
    """Return a number that any change of any bit changes: a sum of words by odd factors, modulo 2**64."""
    total = 0
    for tensor in tensors:
        flat = tensor.detach().contiguous().flatten().view(torch.uint8)
        words = torch.nn.functional.pad(flat, (0, -flat.numel() % 8)).view(torch.int64)
        total = total * 3 + len(words)
        for start in range(0, len(words), _CHUNK):
            part = words[start : start + _CHUNK]
            factors = 2 * torch.arange(start, start + len(part), device=part.device) + 1
            total += int((part * factors).sum())
    return (total + (1 << 63)) % (1 << 64) - (1 << 63)
