"""Live states to plain tensors, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from stquant.checkpoint.schema import CONTROL, GROUP_KEY, Reader
from stquant.codecs import packing
from stquant.codecs.blocks import Grid
from stquant.codecs.format import Format
from stquant.distributed import tensors
from stquant.errors import CheckpointError
from stquant.policy.facts import Choice
from stquant.storage.master import PackedResidual
from stquant.storage.packed import PackedState


def present(state: Mapping[str, Any], param: Tensor, packed: bool = False) -> dict[str, Any]:
    """Return a snapshot of one parameter's live state, as tensors, numbers, lists and dicts.

    The keys are those of the live state; nothing shares memory with it. What has a value per
    element or block is distributed as the parameter is.

    Args:
        state: The live state.
        param: The parameter.
        packed: Keep codes and residuals packed; else they are spread to the parameter's shape,
            whatever their bits.
    """
    whole_blocks = any(isinstance(value, PackedState) for value in state.values())
    return {
        name: _copy(value) if name in ("step", CONTROL) else _present(value, param, packed, whole_blocks)
        for name, value in state.items()
    }


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _present(value: Any, param: Tensor, packed: bool, whole_blocks: bool) -> Any:
    if isinstance(value, PackedState):
        scales = value.scales.reshape(*value.grid.scale_shape, *value.format.scale_parts).clone()
        return {
            **(_present_packed(value) if packed else {"codes": tensors.wrap(_spread(value), param)}),
            "scales": tensors.wrap(scales, param, value.grid),
            "format": value.format.number,
            "block": value.format.block,
            "lo": value.octaves.lo,
            "log2_step": value.octaves.log2_step,
        }
    if isinstance(value, PackedResidual):
        if packed:
            codes = _present_packed(value)
        elif whole_blocks:
            codes = {"codes": tensors.wrap(_spread(value), param)}
        else:  # without scales, a shard may end inside a block
            codes = {"values": tensors.wrap(_to_bytes(value.unpack()), param)}
        return {**codes, "bits": value.bits, "block": value.grid.block}
    return tensors.wrap(value.clone(), param) if isinstance(value, Tensor) else value


def _present_packed(value: PackedState | PackedResidual) -> dict[str, Any]:
    return {"packed": value.codes.clone(), "shape": list(value.grid.shape)}


def _spread(value: PackedState | PackedResidual) -> Tensor:
    """Show codes in the parameter's shape; residuals, which have up to 16 bits, as two bytes each."""
    grid = value.grid
    if isinstance(value, PackedState):
        return packing.spread(value.codes, value.format.bits, grid.row, grid.block).view(grid.shape)
    return packing.spread(value.codes, value.bits, grid.row, grid.block, room=2).view(*grid.shape, 2)


def absorb(
    name: str,
    param: Tensor,
    presented: Mapping[str, Any],
    states: Mapping[str, bool],
    choices: Mapping[str, Choice] | None,
) -> dict[str, Any]:
    """Build a parameter's live state from a presented one, or from that of a plain optimizer.

    Args:
        name: The parameter's name, for errors.
        param: The parameter; gives shape, dtype and device.
        presented: What `present` returned, or the state of a torch optimizer; whole tensors or
            distributed ones, of which this rank's part is taken.
        states: Names of the states expected, and whether they are signed.
        choices: Formats for states that come as plain tensors; None keeps those as they are.

    Returns:
        A new state that shares no memory with `presented`.

    Raises:
        CheckpointError: A part is missing, malformed or does not fit; names the parameter.
    """
    reader = Reader(name, param)
    # A plain optimizer that does not count its steps (SGD) has taken some if it has a state.
    step = presented.get("step", 1) if choices is not None else reader.part("state", presented, "step")
    live: dict[str, Any] = {"step": torch.tensor(float(reader.number("step", step, 0, 1 << 53)), dtype=torch.float32)}
    if "noise_id" in presented:
        live["noise_id"] = reader.number("noise_id", presented["noise_id"], 0, 1 << 61)
    for state, signed in states.items():
        value = reader.part("state", presented, state)
        choice = None if choices is None else choices.get(state)
        live[state] = _absorb_state(reader, state, value, signed, param, choice)
    if CONTROL in presented:
        shape = (len(states), presented[CONTROL].shape[-1]) if isinstance(presented[CONTROL], Tensor) else ()
        live[CONTROL] = reader.small(CONTROL, presented[CONTROL], torch.float32, shape).clone()
    if "residual" in presented:
        live["residual"] = _absorb_residual(reader, presented["residual"], param)
    grids = {value.grid for value in live.values() if isinstance(value, PackedState | PackedResidual)}
    if len(grids) > 1:
        raise reader.fail(f"states are cut into blocks of {sorted(grid.block for grid in grids)}, expected one size")
    unknown = presented.keys() - live.keys()
    if unknown:
        raise reader.fail(f"holds {', '.join(sorted(unknown))}, which this optimizer does not have")
    return live


def _absorb_state(
    reader: Reader, where: str, value: Any, signed: bool, param: Tensor, choice: Choice | None
) -> Tensor | PackedState:
    if isinstance(value, Mapping):
        format = reader.format(where, value, signed)
        grid = _grid(reader, param, format.block)
        octaves = reader.octaves(where, value, format)
        scales = reader.scales(where, value, format, grid).to(param.device)
        state = PackedState.zeros(format, grid, param.device)
        state.octaves = octaves
        state.scales.copy_(scales.reshape(state.scales.shape))
        state.codes.copy_(_packed(reader, where, value, format.bits, grid))
        reader.check_codes(where, state)
        return state
    plain = reader.tensor(where, value, None, tuple(param.shape)).to(param.device)
    if choice is not None and choice.format.packed:
        return _encode(reader, where, plain, choice.format, _grid(reader, param, choice.format.block))
    live = plain_state(param)
    return live.copy_(plain)


def _grid(reader: Reader, param: Tensor, block: int, scaled: bool = True) -> Grid:
    try:
        return tensors.grid_of(reader.name, param, block, scaled)
    except ValueError as error:
        raise CheckpointError(f"{error}; nothing was loaded") from error


def _encode(reader: Reader, where: str, plain: Tensor, format: Format, grid: Grid) -> PackedState:
    if not bool(plain.isfinite().all()):
        raise reader.fail(f"{where} holds non-finite values, which {format.name!r} cannot store")
    return PackedState.encoded(format, plain, grid)


def _absorb_residual(reader: Reader, value: Any, param: Tensor) -> PackedResidual:
    if not isinstance(value, Mapping):
        raise reader.fail(f"residual is {type(value).__name__}, expected a dict")
    bits = reader.number("residual.bits", reader.part("residual", value, "bits"), 1, 16)
    block = reader.number("residual.block", reader.part("residual", value, "block"), 32, 1 << 30)
    if param.dtype is not torch.bfloat16:
        raise reader.fail(
            f"the file holds a {bits}-bit residual of a bfloat16 parameter, the parameter is {param.dtype}; "
            "load the file into bfloat16 parameters"
        )
    grid = _grid(reader, param, block, scaled=False)
    if "values" not in value:
        packed = _packed(reader, "residual", value, bits, grid, room=2)
        return PackedResidual(bits, grid, packed.to(param.device, copy=True))
    values = _from_bytes(reader.tensor("residual.values", value["values"], torch.uint8, (*param.shape, 2)))
    if values.numel() and bool((values & ((1 << (16 - bits)) - 1)).any()):
        raise reader.fail(f"residual.values are not multiples of {1 << (16 - bits)}, as {bits} bits need")
    return PackedResidual.pack(bits, grid, values.to(param.device))


def _packed(reader: Reader, where: str, value: Mapping[str, Any], bits: int, grid: Grid, room: int = 1) -> Tensor:
    """Return the packed codes of a presented state, whichever of the two ways they are kept."""
    if "packed" in value:
        return reader.packed(where, value, bits, grid)
    shape = (*reader.shape, room) if room > 1 else tuple(reader.shape)
    shown = reader.tensor(f"{where}.codes", reader.part(where, value, "codes"), torch.uint8, shape)
    shown = shown.reshape(grid.rows, room * grid.row)
    packed = packing.gather(shown, bits, grid.row, grid.block, room)
    if not torch.equal(packing.spread(packed, bits, grid.row, grid.block, room), shown):
        raise reader.fail(f"{where}.codes holds more than {bits} bits per code")
    return packed


def _to_bytes(values: Tensor) -> Tensor:
    """Show int16 as pairs of bytes, because neither gloo nor NCCL moves int16."""
    return values.unsqueeze(-1).view(torch.uint8)


def _from_bytes(pairs: Tensor) -> Tensor:
    return pairs.contiguous().view(torch.int16).squeeze(-1)


def plain_state(param: Tensor) -> Tensor:
    """Return a state of zeros that is not packed: fp64 for fp64 parameters, fp32 for all others.

    It is of the shape of what this rank holds.
    """
    dtype = torch.float64 if param.dtype is torch.float64 else torch.float32
    return torch.zeros_like(tensors.local(param), dtype=dtype, memory_format=torch.preserve_format)


def export_all(groups: Sequence[Mapping[str, Any]], states: Mapping[Tensor, Mapping[str, Any]]) -> dict[str, Any]:
    """Return groups and live states as a plain torch optimizer would save them, states in fp32."""
    exported: dict[str, Any] = {"state": {}, "param_groups": []}
    index = 0
    for group in groups:
        plain = {key: value for key, value in group.items() if key not in ("params", GROUP_KEY)}
        plain["params"] = list(range(index, index + len(group["params"])))
        exported["param_groups"].append(plain)
        for param in group["params"]:
            if param in states:
                exported["state"][index] = export(states[param], param)
            index += 1
    return exported


def export(state: Mapping[str, Any], param: Tensor) -> dict[str, Tensor]:
    """Return one live state as a plain torch optimizer would save it, in fp32."""
    exported = {}
    for name, value in state.items():
        if isinstance(value, PackedState):
            exported[name] = tensors.wrap(value.decode(), param)
        elif isinstance(value, Tensor) and name != CONTROL:
            exported[name] = value.clone() if name == "step" else tensors.wrap(value.clone(), param)
    return exported
