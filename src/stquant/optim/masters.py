"""bf16 models that remember their fp32 weights: into them, and back out exactly."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from stquant.codecs import residual
from stquant.distributed import tensors
from stquant.storage.master import WeightRounding, check_master_bits


def cast_model(model: nn.Module, master_bits: int | str = "auto") -> dict[str, Tensor]:
    """Cast a model to bf16 in place and return what its weights lost.

    Hand the result to the optimizer, which starts from it:
    `AdamW(model.named_parameters(), masters=stquant.cast_model(model))`.

    Args:
        model: The model; parameters and floating buffers become bf16. Parameters stay the same
            objects; fp64 ones are rounded to fp32 first.
        master_bits: Bits of the residuals: "auto" (8), 0 to 8, or 16, which loses nothing.

    Returns:
        Residuals by parameter name: int16, in the parameter's shape, in units of 2**-16 of a bf16
        step. Parameters that are bf16 already have none.

    Raises:
        ValueError: `master_bits` is not available, or the model is sharded.
    """
    if master_bits is None:
        raise ValueError('master_bits=None keeps no residual; use "auto", 0 to 8, 16, or model.to(torch.bfloat16)')
    bits = WeightRounding.of("", torch.bfloat16, check_master_bits(master_bits)).residual_bits
    masters = {}
    with torch.no_grad():
        for name, param in model.named_parameters():
            if tensors.is_distributed(param):
                raise ValueError(f"parameter {name!r} is distributed already; cast the model before it is sharded")
            if param.is_floating_point() and param.dtype is not torch.bfloat16:
                half, rest = residual.split(param.detach().float().contiguous(), bits)
                param.data = torch.empty_like(param, dtype=torch.bfloat16).copy_(half)
                masters[name] = rest
    model.to(torch.bfloat16)
    return masters


def check_masters(masters: dict[str, Tensor], named: dict[str, tuple[Tensor, int]]) -> None:
    """Raise if residuals do not fit the parameters they are named after.

    Args:
        masters: int16 residuals by name.
        named: The optimizer's parameters by name, with the bits of their residuals.

    Raises:
        ValueError: A name is unknown, or a residual has the wrong shape, dtype or precision.
    """
    for name, rest in masters.items():
        if name not in named:
            raise ValueError(
                f"masters has {name!r}, which is no parameter of this optimizer; pass model.named_parameters() "
                f"so that parameters have the names of cast_model (here: {', '.join(list(named)[:3])}, ...)"
            )
        param, bits = named[name]
        if rest.dtype is not torch.int16 or rest.shape != param.shape:
            raise ValueError(
                f"masters[{name!r}] is {rest.dtype} {tuple(rest.shape)}; allowed is int16 {tuple(param.shape)}, "
                "as cast_model returns it"
            )
        if param.dtype is not torch.bfloat16:
            raise ValueError(f"masters has {name!r}, whose parameter is {param.dtype}; only bfloat16 has residuals")
        if rest.numel() and bool((rest.int() % (1 << (16 - bits))).any()):
            raise ValueError(
                f"masters[{name!r}] needs more than the {bits} bits of master_bits; "
                "pass the same master_bits to cast_model and to the optimizer"
            )


def export_fp32(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the model's state dict with the exact fp32 weights that training works on.

    Args:
        model: The model.
        optimizer: Its optimizer; weights that it keeps residuals for are joined with them.

    Returns:
        Names and values as in `model.state_dict()`, parameters in fp32 (fp64 stays); copies.
    """
    exported: dict[str, Any] = {}
    parameters = set(model.parameters())
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            exported[name] = value
            continue
        plain = value.detach()
        rest = optimizer.state[value].get("residual") if value in optimizer.state else None
        if rest is not None:
            exported[name] = tensors.wrap(residual.join(tensors.local(plain), rest.unpack()), plain)
        elif value in parameters and plain.dtype in (torch.bfloat16, torch.float16):
            exported[name] = plain.float()
        else:
            exported[name] = plain.clone()
    return exported
