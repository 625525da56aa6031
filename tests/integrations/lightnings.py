"""Runs under Lightning: plain, and sharded by FSDP2 on several processes."""

from __future__ import annotations

import csv
import logging
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from stquant.integrations.lightning import LedgerCallback
from stquant.report import runlog
from stquant.report.decisions import predicted
from tests.integrations.forks import die
from tests.integrations.tables import OPTIMIZERS, batch, equal, perceptron, same_logs, weights

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

EPOCH = 3
"""Steps of an epoch; a run is saved after one and ends after two."""


class Module(LightningModule):
    def __init__(self, optimizer: str) -> None:
        super().__init__()
        self.optimizer = optimizer

    def configure_model(self) -> None:
        self.inner = perceptron()
        if self.device_mesh is not None:
            mesh = self.device_mesh["data_parallel"]
            for layer in (self.inner[0], self.inner[3]):
                fully_shard(layer, mesh=mesh)
            fully_shard(self.inner, mesh=mesh)

    def training_step(self, data: Tensor, index: int) -> Tensor:
        return (self.inner(data) - data).square().mean()

    def configure_optimizers(self) -> Any:
        kind, options = OPTIMIZERS[self.optimizer]
        return kind(self.named_parameters(), **options)


def trainer(folder: Path, ranks: int, epochs: int, *callbacks: Callback, **options: Any) -> Trainer:
    sharded = ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1)
    return Trainer(
        accelerator="cpu",
        strategy=sharded if ranks > 1 else "auto",
        devices=ranks,
        max_epochs=epochs,
        default_root_dir=folder,
        callbacks=list(callbacks),
        **{"logger": False, "enable_checkpointing": False, "log_every_n_steps": 1, **options},
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )


def fit(run: Trainer, module: Module, path: Path | None = None) -> dict[str, Tensor]:
    run.fit(
        module, DataLoader([batch(step, run.global_rank) for step in range(EPOCH)], batch_size=None), ckpt_path=path
    )
    assert run.global_step == EPOCH * run.max_epochs
    return weights(module)


class Death(Callback):
    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == EPOCH + 1 and trainer.global_rank == trainer.world_size - 1:
            die()


def callbacks(optimizer: str, folder: Path) -> list[Callback]:
    return [LedgerCallback(folder / "run.jsonl")] if optimizer == "adaptive" else []


def killed(folder: Path, ranks: int) -> None:
    """Save all the runs after an epoch, and let a rank die in the next."""
    for optimizer in OPTIMIZERS:
        begun = trainer(folder, ranks, 1, *callbacks(optimizer, folder))
        fit(begun, Module(optimizer))
        begun.save_checkpoint(folder / optimizer)
    again = trainer(folder, ranks, 2, *callbacks(optimizer, folder), Death())
    fit(again, Module(optimizer), folder / optimizer)


def resumed(folder: Path, ranks: int) -> dict[str, bool]:
    """Return, by optimizer, whether the resumed run has the weights of one that nobody disturbed."""
    same = {}
    for optimizer in OPTIMIZERS:
        whole = fit(trainer(folder, ranks, 2, *callbacks(optimizer, folder / "whole")), Module(optimizer))
        again = trainer(folder, ranks, 2, *callbacks(optimizer, folder))
        same[optimizer] = equal(whole, fit(again, Module(optimizer), folder / optimizer))
    if again.is_global_zero:
        same["log"] = same_logs(folder / "run.jsonl", folder / "whole" / "run.jsonl")
    return same


def logged(folder: Path) -> None:
    run = trainer(folder, 1, 1, LedgerCallback(folder / "run.jsonl"), logger=CSVLogger(folder), log_every_n_steps=EPOCH)
    fit(run, Module("adaptive"))
    (row,) = csv.DictReader((Path(run.logger.log_dir) / "metrics.csv").open())
    ledger, (decision,) = run.optimizers[0].ledger(), run.optimizers[0].decisions()
    expected = {"state_bytes": ledger.bytes, "state_bits": ledger.bits, "state_damage": predicted(decision)}
    found = {name: torch.tensor(float(row[name])) for name in expected}
    assert found == {name: torch.tensor(float(value)) for name, value in expected.items()}  # metrics are fp32
    assert [step for step, _ in runlog.read(folder / "run.jsonl").losses] == [EPOCH]


def refused(folder: Path) -> str:
    run = trainer(folder, 1, 1, LedgerCallback())
    try:
        fit(run, Module("torch"))
    except ValueError as error:
        return str(error)
    raise AssertionError("a module without an optimizer of stquant was logged")
