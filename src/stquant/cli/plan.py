"""`stquant plan`: what training a model costs in bytes, before there is a machine for it."""

from __future__ import annotations

import re
from enum import Enum
from typing import Annotated

import torch
import typer
from rich.table import Table

from stquant.cli import console
from stquant.jobs.contenders import policy_of
from stquant.planning import plan as planning
from stquant.planning.plan import Cost, Plan
from stquant.planning.sources import blueprint
from stquant.policy.policies import Recipe

OURS = ("8", "6", "5", "4", "3", "adaptive", "2", "2+0")
RECIPES = tuple(name for name in Recipe.NAMES if name != "nf4")

_UNITS = {
    f"{prefix}{unit}": base**power
    for unit, base in (("b", 1000), ("ib", 1024))
    for power, prefix in enumerate(("", "k", "m", "g", "t"))
}


class Dtype(str, Enum):
    """Dtypes of the weights."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


def plan(
    model: Annotated[
        str,
        typer.Argument(
            help="A name such as gpt2 or llama-3.1-8b, a model type of transformers, a config.json, "
            "a checkpoint (safetensors or torch), or package.module:factory."
        ),
    ],
    policy: Annotated[
        list[str] | None, typer.Option(help="Policy to plan with, as of `stquant train`; may be repeated.")
    ] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="Of the weights; the model's own by default.")] = None,
    master_bits: Annotated[
        int | None, typer.Option(min=0, max=16, help="Residual bits of bfloat16 weights; 8 by default.")
    ] = None,
    fsdp: Annotated[int, typer.Option(min=1, help="FSDP2 ranks; bytes are then those of the fullest rank.")] = 1,
    memory: Annotated[str, typer.Option(help="What a rank has, e.g. 24GB or 24GiB: say what fits.")] = "",
    json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Say what weights, residuals, gradients and states of a model take; exit with 1 if nothing fits."""
    with console.plain_errors():
        result = planning.plan(
            blueprint(model),
            {name: policy_of(name) for name in policy or OURS},
            recipes={} if policy else {name: policy_of(name) for name in RECIPES},
            dtype=None if dtype is None else getattr(torch, dtype.value),
            master_bits="auto" if master_bits is None else master_bits,
            ranks=fsdp,
            memory=_bytes(memory) if memory else None,
        )
    if json:
        console.print_json(result.to_dict())
    else:
        _print(result)
    if result.memory is not None and result.best is None:
        raise typer.Exit(1)


def _bytes(text: str) -> int:
    """Return the bytes that a size such as 24GB (powers of 1000) or 24GiB (of 1024) names."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)", text.strip().lower())
    if not found or found[2] not in _UNITS:
        raise ValueError(f"size {text!r} is not understood; use for example 24GB, 24GiB or 24000000000B")
    return int(float(found[1]) * _UNITS[found[2]])


def _print(result: Plan) -> None:
    say = console.out.print
    per_rank = f", per rank of {result.ranks} (FSDP2)" if result.ranks > 1 else ""
    frozen = "" if result.trained == result.parameters else f", {result.trained:,} of them trained"
    say(f"{result.model}: {result.parameters:,} parameters{frozen}; bytes{per_rank}", markup=False, highlight=False)
    table = Table(box=None, pad_edge=False)
    for column in ("optimizer", "weights are"):
        table.add_column(column, no_wrap=True)
    for column in ("weights", "residual", "gradients", "states", "sum", "bits"):
        table.add_column(column, justify="right", no_wrap=True)
    if result.memory is not None:
        table.add_column("fits", no_wrap=True)
    for cost in result.costs:
        table.add_row(*_cells(cost, result.fits(cost)))
    say(table)
    say("activations, temporaries and the framework come on top; bits: true bits per state element", highlight=False)
    if result.memory is not None:
        say(_answer(result, result.memory), highlight=False, markup=False)


def _cells(cost: Cost, fits: bool | None) -> list[str]:
    sizes = (cost.weights, cost.residual, cost.gradients, cost.states, cost.total)
    cells = [cost.name, cost.dtype, *(f"{size:,}" for size in sizes), f"{cost.bits:.2f}"]
    return cells if fits is None else [*cells, "yes" if fits else "no"]


def _answer(result: Plan, memory: int) -> str:
    if result.best is None:
        least = min((cost for cost in result.costs if cost.adaptable), key=lambda cost: cost.total)
        return (
            f"nothing fits into {memory:,} bytes: {least.name} takes {least.total:,}; "
            "use --dtype bfloat16, fewer --master-bits or more --fsdp ranks"
        )
    return (
        f"{memory:,} bytes have room for {result.bits_that_fit:.2f} true bits per state element, or for "
        f"stquant.Budget(bytes={result.room}), less what activations need; most precise of these that fits: "
        f"{result.best.name}, which leaves {memory - result.best.total:,} bytes"
    )
