"""`stquant train`: the example job, one run."""

from __future__ import annotations

from contextlib import nullcontext
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from stquant.cli import console
from stquant.jobs.parallel import Job
from stquant.report import record
from stquant.report.runlog import RunLog


class Model(str, Enum):
    """Names of the workloads."""

    GPT2 = "gpt2"
    VIT = "vit"
    CLIP = "clip"


class Dtype(str, Enum):
    """Dtypes of the parameters."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


def train(
    model: Annotated[
        Model, typer.Option(help="GPT-2 on source text, ViT on handwritten digits, or CLIP on digits and captions.")
    ],
    policy: Annotated[
        str,
        typer.Option(
            help="adaptive, torch or nadam (torch's own in fp32), fp32 (ours, unpacked), a published recipe "
            "(bnb8, torchao4, flash8, solo42, nf4), a width such as 4, or formats "
            "of exp_avg and exp_avg_sq such as 2+0 or dynamic2+log1."
        ),
    ] = "adaptive",
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of the whole run.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights, data and rounding.")] = 0,
    dtype: Annotated[Dtype, typer.Option(help="Of the parameters.")] = Dtype.FLOAT32,
    master_bits: Annotated[int, typer.Option(min=0, max=16, help="Residual bits of bfloat16 parameters.")] = 8,
    out: Annotated[Path | None, typer.Option(help="Folder for the checkpoint and run.json.")] = None,
    save_every: Annotated[int, typer.Option(min=1, help="Steps between checkpoints, with --out.")] = 200,
    resume: Annotated[Path | None, typer.Option(help="Checkpoint to continue from, bit for bit.")] = None,
    log: Annotated[
        Path | None, typer.Option(help="Run log for `stquant report`; with --resume it is continued.")
    ] = None,
    ledger: Annotated[bool, typer.Option("--ledger", help="Print what every state costs.")] = False,
    quiet: console.Quiet = False,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Train a small real model on real data with a policy of your choice."""
    with console.plain_errors():
        run = Job(model.value, policy, seed, steps, dtype.value, master_bits).run()
        if resume is not None:
            run.resume(resume)
        written = None if log is None else RunLog(log).attach(run.optimizer)
    with console.bars(quiet=quiet) as bars, written or nullcontext():
        bar = bars.add_task(f"{model.value}  {run.contender.name}", total=run.steps, completed=run.done, loss=0.0)
        for loss in run.train():
            bars.update(bar, completed=run.done, loss=loss)
            if written is not None:
                written.loss(run.done, loss)
            if out is not None and (run.done % save_every == 0 or run.done == run.steps):
                run.save(out / "checkpoint.pt")
    result = run.result()
    if out is not None:
        record.write(out / "run.json", {"run": result})
    if json:
        console.print_json(result)
        return
    if ledger and hasattr(run.optimizer, "ledger"):
        console.out.print(str(run.optimizer.ledger()), markup=False, highlight=False, soft_wrap=True)
    if not quiet:
        _summarise(result)


def _summarise(result: dict[str, Any]) -> None:
    console.out.print(
        f"{result['model']}, {result['optimizer']}, seed {result['seed']}: loss {result['loss']:.4f} after "
        f"{result['steps']} steps; {result['state_bytes']:,} bytes of state for {result['parameters']:,} parameters, "
        f"{result['true_bits']:.2f} true bits per state element",
        highlight=False,
    )
