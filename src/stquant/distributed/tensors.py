"""The local part of a distributed parameter, and local results shown as distributed tensors.

States live as plain local tensors on the block grid of the whole parameter, of which a rank holds
a box. What is saved are DTensors with the parameter's own mesh and placements, so torch's
checkpoint functions reshard it. For plain tensors every function here does nothing.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from stquant.codecs.blocks import Box, Grid
from stquant.codecs.format import MIN_BLOCK

_FLATTENED = "_fsdp_flattened"
"""What `FullyShardedDataParallel` marks the parameters with that it has flattened."""


def is_distributed(tensor: object) -> bool:
    """Say whether something is a distributed tensor."""
    return isinstance(tensor, DTensor)


def local(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor; it shares memory with the tensor."""
    if not isinstance(tensor, DTensor):
        return tensor.detach() if tensor.requires_grad else tensor
    with torch.no_grad():
        part = tensor.to_local()
    return part.wait() if isinstance(part, AsyncCollectiveTensor) else part.detach()


def local_grad(param: Tensor, grad: Tensor) -> Tensor:
    """Return what belongs to this rank's part of `param` of its gradient.

    A gradient with other placements, for example one that is still to be summed, is redistributed,
    which every rank of the mesh has to take part in.
    """
    if isinstance(param, DTensor) and isinstance(grad, DTensor) and grad.placements != param.placements:
        grad = grad.redistribute(placements=param.placements)
    return local(grad)


def check_supported(name: str, param: Tensor) -> None:
    """Raise `ValueError` if a parameter is spread over ranks in a way that is not supported."""
    if getattr(param, _FLATTENED, False):
        raise ValueError(
            f"parameter {name!r} belongs to FullyShardedDataParallel (FSDP1), which flattens parameters of any "
            "shape into one vector; use torch.distributed.fsdp.fully_shard (FSDP2)"
        )
    if not isinstance(param, DTensor):
        return
    for placement in param.placements:
        if not isinstance(placement, Shard | _StridedShard | Replicate):
            raise ValueError(f"parameter {name!r} has placement {placement}; allowed are Shard and Replicate")
    spec = _spec(param, tuple(param.shape), param.placements)
    if getattr(spec, "shard_order", None) != getattr(param._spec, "shard_order", None):
        raise ValueError(f"parameter {name!r} is sharded in the order {param._spec.shard_order}; use the default order")
    if _box(param.device_mesh, param.placements, tuple(param.shape)) is None:
        raise ValueError(f"parameter {name!r} is sharded into parts of several pieces each ({param.placements})")


def box_of(param: Tensor) -> Box | None:
    """Return where the part that this rank holds lies; None for a parameter that is held whole."""
    if not isinstance(param, DTensor):
        return None
    box = _box(param.device_mesh, param.placements, tuple(param.shape))
    return None if box is None or box.shape == box.whole else box


def grid_of(name: str, param: Tensor, block: int, scaled: bool = True) -> Grid:
    """Return the block grid of the part of a parameter that this rank holds.

    Args:
        name: The parameter's name, for errors.
        param: The parameter.
        block: Elements of a full block.
        scaled: Whether blocks have a scale and must not be cut.

    Raises:
        ValueError: A rank's part ends inside a block. All ranks raise, whichever it is.
    """
    grid = Grid.of(param.shape, block, box_of(param))
    if not isinstance(param, DTensor):
        return grid
    reason = grid.why_not_index()
    if reason is not None:
        raise ValueError(f"parameter {name!r} cannot be sharded like that: {reason}; shard it along another dimension")
    if scaled and grid.lead < param.dim():
        _check_cuts(name, param, grid)
    return grid


def wrap(part: Tensor, like: Tensor, grid: Grid | None = None) -> Tensor:
    """Show a local tensor as a distributed one that is spread like the parameter `like`.

    Args:
        part: The local tensor: of the shape of the parameter's local part, or of the scales of
            its `grid`; further dimensions may follow.
        like: The parameter; for a plain one `part` is returned as it is.
        grid: The grid that `part` holds the scales of; None for one value per element.
    """
    if not isinstance(like, DTensor):
        return part
    if grid is None:
        shape, placements = tuple(like.shape), like.placements
    else:
        shape, placements = grid.whole.scale_shape, _scale_placements(like, grid)
    shape = (*shape, *part.shape[len(shape) :])
    spec = _spec(like, shape, placements, part.dtype)
    return DTensor(part, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def unwrap(value: Tensor, like: Tensor, grid: Grid | None = None) -> Tensor:
    """Return this rank's part of a tensor that is whole or distributed; the inverse of `wrap`.

    Args:
        value: A tensor of the whole shape, plain or distributed; may be returned as it is.
        like: The parameter.
        grid: The grid that `value` holds the scales of; None for one value per element.
    """
    if not isinstance(like, DTensor):
        return value.full_tensor() if isinstance(value, DTensor) else value
    placements = like.placements if grid is None else _scale_placements(like, grid)
    if isinstance(value, DTensor):
        if value.device_mesh != like.device_mesh:
            return unwrap(value.full_tensor(), like, grid)
        return local(value if value.placements == placements else value.redistribute(placements=placements))
    box = _box(like.device_mesh, placements, tuple(value.shape))
    assert box is not None
    for dim, (start, size) in enumerate(zip(box.start, box.shape, strict=True)):
        value = value.narrow(dim, start, size)
    return value


@functools.lru_cache(maxsize=4096)
def _box(mesh: DeviceMesh, placements: tuple[Placement, ...], shape: tuple[int, ...]) -> Box | None:
    """Return the box of this rank; None if it holds several pieces."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "a parameter of a mesh that this rank is not part of"
    start, sizes = [], []
    for dim in range(len(shape)):
        held = _indices(mesh, placements, shape[dim], dim, coordinate)
        if held.numel() and int(held[-1] - held[0]) != held.numel() - 1:
            return None
        start.append(int(held[0]) if held.numel() else shape[dim])
        sizes.append(held.numel())
    return Box(shape, tuple(start), tuple(sizes))


def _indices(
    mesh: DeviceMesh, placements: Sequence[Placement], size: int, dim: int, coordinate: Sequence[int]
) -> Tensor:
    """Return which indices of a dimension the rank at a coordinate of the mesh holds."""
    held = torch.arange(size)
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard | _StridedShard) and placement.dim == dim:
            parts, _ = _along(0, placement)._split_tensor(held, mesh.size(axis), with_padding=False, contiguous=False)
            held = parts[coordinate[axis]]
    return held


def _along(dim: int, placement: Shard | _StridedShard) -> Shard | _StridedShard:
    """Return the placement for another dimension."""
    if isinstance(placement, _StridedShard):
        return _StridedShard(dim, split_factor=placement.split_factor)
    return Shard(dim)


def _check_cuts(name: str, param: DTensor, grid: Grid) -> None:
    """Raise if any rank's part of a row starts inside a block."""
    whole, inner = grid.whole, 1
    for size in whole.shape[grid.lead + 1 :]:
        inner *= size
    cuts = sorted({start * inner for start in _starts(param, grid.lead)})
    if all(cut % grid.block == 0 for cut in cuts):
        return
    fits = [1 << power for power in range(31) if all(cut % (1 << power) == 0 for cut in cuts)][-1]
    advice = f"use a policy with block={fits}, for example stquant.Fixed(bits=4, block={fits})"
    if fits < MIN_BLOCK:
        advice = "shard it along dimension 0, or give it a group with policy='fp32'"
    raise ValueError(
        f"parameter {name!r} of shape {tuple(param.shape)} is sharded along dimension {grid.lead} at elements "
        f"{', '.join(map(str, cuts[1:]))} of rows of {whole.row}, inside blocks of {grid.block}; {advice}"
    )


def _starts(param: DTensor, dim: int) -> Iterator[int]:
    """Yield where the parts of all ranks that hold any start along a dimension."""
    mesh = param.device_mesh
    axes = [
        range(mesh.size(axis)) if isinstance(p, Shard | _StridedShard) and p.dim == dim else range(1)
        for axis, p in enumerate(param.placements)
    ]
    for coordinate in itertools.product(*axes):
        held = _indices(mesh, param.placements, param.shape[dim], dim, coordinate)
        if held.numel():
            yield int(held[0])


def _scale_placements(param: DTensor, grid: Grid) -> tuple[Placement, ...]:
    """Placements of the scales, whose last dimension stands for all that make up a row."""
    return tuple(
        _along(min(placement.dim, grid.lead), placement) if isinstance(placement, Shard | _StridedShard) else placement
        for placement in param.placements
    )


def _spec(
    param: DTensor, shape: tuple[int, ...], placements: Sequence[Placement], dtype: torch.dtype | None = None
) -> DTensorSpec:
    stride = tuple(torch.empty(shape, device="meta").stride())
    meta = TensorMeta(torch.Size(shape), stride, dtype or param.dtype)
    return DTensorSpec(param.device_mesh, tuple(placements), tensor_meta=meta)
