"""Real runs under trainers: train, save, stop, resume in a new process's objects; compared bit for bit.

torch's AdamW runs through the same lines, so that a trainer that does not resume exactly shows.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stquant
from tests.planning.models import gpt2, vit

pytestmark = pytest.mark.filterwarnings("default")

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "torch": (torch.optim.AdamW, {"lr": 1e-2}),
    "default": (stquant.AdamW, {"lr": 1e-2}),
    "solo42": (stquant.AdamW, {"lr": 1e-2, "policy": "solo42"}),
}


def adapted() -> nn.Module:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=64, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=True)
    return peft.get_peft_model(gpt2(), config)  # type: ignore[no-any-return]


def halved() -> nn.Module:
    return gpt2().bfloat16()


def tokens(count: int = 16) -> list[dict[str, Tensor]]:
    rows = torch.randint(97, (count, 16), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in rows]


class Bare(nn.Module):
    """A ViT that the trainer saves under its own names.

    transformers 5.24 writes ViT's layers under older names and does not find them on resuming.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inner = vit()

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Any:
        return self.inner(pixel_values=pixel_values, labels=labels)


def pictures(count: int = 16) -> list[dict[str, Any]]:
    images = torch.randn(count, 3, 28, 28, generator=torch.Generator().manual_seed(1))
    return [{"pixel_values": image, "labels": number % 2} for number, image in enumerate(images)]


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def trainer(folder: Path, make: Callable[[], nn.Module], optimizer: str, steps: int = 4, **options: Any) -> Any:
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    torch.manual_seed(0)
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        save_steps=2,
        logging_steps=1,
        lr_scheduler_type="constant",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        **options,
    )
    data = pictures() if make is Bare else tokens()
    return Trainer(make(), arguments, train_dataset=data, optimizer_cls_and_kwargs=OPTIMIZERS[optimizer])


@pytest.mark.parametrize("make", [gpt2, halved, adapted, Bare], ids=["gpt2", "bf16", "lora", "vit"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_trainer_resumes_exactly(make: Callable[[], nn.Module], optimizer: str, tmp_path: Path) -> None:
    whole = trainer(tmp_path, make, optimizer)
    before = weights(whole.model)
    whole.train()
    again = trainer(tmp_path, make, optimizer)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert again.state.global_step == 4
    assert not equal(weights(whole.model), before)
    assert equal(weights(again.model), weights(whole.model))


def test_trainer_logs_the_ledger(tmp_path: Path) -> None:
    from transformers import TrainerCallback

    from stquant.integrations.transformers import log_ledger

    class Reporter(TrainerCallback):  # type: ignore[misc]
        seen: list[dict[str, Any]] = []

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
            self.seen.append(dict(logs))

    run = trainer(tmp_path, gpt2, "default", steps=1)
    run.add_callback(Reporter)
    log_ledger(run)
    run.train()
    ledger = run.optimizer.optimizer.ledger()
    for entry in (*run.state.log_history, *Reporter.seen):
        assert (entry["state_bytes"], entry["state_bits"]) == (ledger.bytes, ledger.bits)
    assert len(Reporter.seen) == len(run.state.log_history) == 2


def test_another_optimizer_has_no_ledger_to_log(tmp_path: Path) -> None:
    from stquant.integrations.transformers import log_ledger

    run = trainer(tmp_path, gpt2, "torch", steps=1)
    log_ledger(run)
    with pytest.raises(ValueError, match="optimizer is AdamW, which has no ledger"):
        run.train()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_accelerate_resumes_exactly(optimizer: str, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    kind, options = OPTIMIZERS[optimizer]

    def prepared() -> tuple[Any, nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        accelerator = accelerate.Accelerator(cpu=True)
        model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64))
        return accelerator, *accelerator.prepare(model, kind(model.named_parameters(), **options))

    def train(accelerator: Any, model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            batch = torch.randn(8, 64, generator=torch.Generator().manual_seed(step))
            accelerator.backward((model(batch) - batch).square().mean())
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    accelerator, model, first = prepared()
    train(accelerator, model, first, range(3))
    accelerator.save_state(tmp_path, safe_serialization=False)
    train(accelerator, model, first, range(3, 6))
    accelerator, other, second = prepared()
    accelerator.load_state(tmp_path)
    assert not equal(weights(other), weights(model))
    train(accelerator, other, second, range(3, 6))
    assert equal(weights(other), weights(model))
