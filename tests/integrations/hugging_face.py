"""Runs under Hugging Face's Trainer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import (
    GPT2LMHeadModel,  # noqa: F401 # loaded here rather than in every fork
    Trainer,
    TrainerCallback,
    TrainingArguments,
    ViTForImageClassification,  # noqa: F401
)

from stquant.integrations.transformers import log_ledger
from stquant.report.decisions import predicted
from tests.integrations.forks import die
from tests.integrations.tables import OPTIMIZERS, equal, same_logs, weights
from tests.planning.models import gpt2, vit

SAVED, KILLED, END = 2, 3, 4
"""Steps at which a run is saved, killed, and at its end."""


def adapted() -> nn.Module:
    config = LoraConfig(r=64, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=True)
    return get_peft_model(gpt2(), config)


def halved() -> nn.Module:
    return gpt2().bfloat16()


class Bare(nn.Module):
    """A ViT that the trainer saves under its own names.

    transformers 5.24 writes ViT's layers under older names and does not find them on resuming.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inner = vit()

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Any:
        return self.inner(pixel_values=pixel_values, labels=labels)


MODELS: dict[str, Callable[[], nn.Module]] = {"gpt2": gpt2, "bf16": halved, "lora": adapted, "vit": Bare}


def tokens() -> list[dict[str, Tensor]]:
    rows = torch.randint(97, (16, 16), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in rows]


def pictures() -> list[dict[str, Any]]:
    images = torch.randn(16, 3, 28, 28, generator=torch.Generator().manual_seed(1))
    return [{"pixel_values": image, "labels": number % 2} for number, image in enumerate(images)]


def trainer(folder: Path, model: str, optimizer: str, **options: Any) -> Trainer:
    torch.manual_seed(0)
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=END,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        logging_steps=1,
        lr_scheduler_type="constant",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        **options,
    )
    data = pictures() if model == "vit" else tokens()
    run = Trainer(MODELS[model](), arguments, train_dataset=data, optimizer_cls_and_kwargs=OPTIMIZERS[optimizer])
    if optimizer == "adaptive":
        log_ledger(run, folder / "run.jsonl")
    return run


class Death(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == KILLED:
            die()


def killed(folder: Path, model: str, optimizer: str) -> None:
    run = trainer(folder, model, optimizer, save_steps=SAVED)
    run.add_callback(Death)
    run.train()


def resumed(folder: Path, model: str, optimizer: str) -> None:
    """Continue what was killed, and compare it with a run that nobody disturbed."""
    again = trainer(folder, model, optimizer, save_strategy="no")
    before = weights(again.model)
    again.train(resume_from_checkpoint=True)
    assert [entry["step"] for entry in again.state.log_history if "loss" in entry] == [1, 2, 3, 4]
    whole = trainer(folder / "whole", model, optimizer, save_strategy="no")
    whole.train()
    assert not equal(weights(whole.model), before)
    assert equal(weights(again.model), weights(whole.model))
    if optimizer == "adaptive":
        assert same_logs(folder / "run.jsonl", folder / "whole" / "run.jsonl")


class Reporter(TrainerCallback):
    seen: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        self.seen.append(dict(logs))


def logged(folder: Path) -> None:
    run = trainer(folder, "gpt2", "adaptive", save_strategy="no")
    run.add_callback(Reporter)
    run.train()
    optimizer = run.optimizer.optimizer
    expected = {
        "state_bytes": optimizer.ledger().bytes,
        "state_bits": optimizer.ledger().bits,
        "state_damage": predicted(optimizer.decisions()[0]),
    }
    assert len(Reporter.seen) == len(run.state.log_history) == END + 1
    for entries in (run.state.log_history, Reporter.seen):
        assert all(expected.keys() <= entry.keys() for entry in entries)
        assert {name: entries[-1][name] for name in expected} == expected


def refused(folder: Path) -> str:
    run = trainer(folder, "gpt2", "torch", save_strategy="no")
    log_ledger(run)
    try:
        run.train()
    except ValueError as error:
        return str(error)
    raise AssertionError("an optimizer without a ledger was logged")
