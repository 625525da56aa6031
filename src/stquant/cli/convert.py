"""`stquant convert`: optimizer checkpoints of other libraries to ours, and to plain torch."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from stquant.checkpoint import convert as conversion
from stquant.cli import console, files
from stquant.jobs.contenders import policy_of


class Kind(str, Enum):
    """What a checkpoint can be converted to."""

    STQUANT = "stquant"
    TORCH = "torch"


def convert(
    source: Annotated[Path, typer.Argument(help="Checkpoint of AdamW or Adam: torch, bitsandbytes, torchao, stquant.")],
    target: Annotated[Path, typer.Argument(help="File to write; must not exist.")],
    to: Annotated[Kind, typer.Option(help="Whose optimizer is to load the result.")] = Kind.STQUANT,
    policy: Annotated[str, typer.Option(help="Formats, with --to stquant: as of `stquant train`.")] = "2+0",
    entry: Annotated[str, typer.Option(help="Where a file of several things has the optimizer, e.g. optimizer.")] = "",
    model: Annotated[Path | None, typer.Option(help="Model checkpoint: names parameters, checks shapes.")] = None,
    model_entry: Annotated[str, typer.Option(help="Where that file has the model.")] = "",
    quiet: console.Quiet = False,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Convert an optimizer's checkpoint; the result is written completely or not at all."""
    with console.plain_errors():
        saved = files.read(source, entry)
        kind = conversion.kind_of(saved)
        shapes = None if model is None else conversion.shapes_of(files.read(model, model_entry))
        with console.bars("parameters", quiet) as bars:
            bar = bars.add_task(f"{kind} to {to.value}", total=None)

            def tell(done: int, total: int) -> None:
                bars.update(bar, completed=done, total=total)

            if to is Kind.STQUANT:
                result = conversion.to_stquant(saved, policy_of(policy), shapes=shapes, progress=tell)
            else:
                result = conversion.to_torch(saved, shapes=shapes, progress=tell)
        conversion.save(result, target)
    summary = {
        "from": kind,
        "to": to.value,
        "parameters": sum(len(group["params"]) for group in result["param_groups"]),
        "states": len(result["state"]),
        "file": str(target),
        "bytes": target.stat().st_size,
    }
    if json:
        console.print_json(summary)
    elif not quiet:
        console.out.print(
            f"{kind} to {to.value}: states of {summary['states']} of {summary['parameters']} parameters, "
            f"{summary['bytes']:,} bytes in {target}",
            highlight=False,
            markup=False,
        )
