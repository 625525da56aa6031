"""Training loops of others: transformers' Trainer and Accelerate, with one line changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import stquant

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")

pytestmark = pytest.mark.filterwarnings("ignore")


class Network(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(96, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        out = self.layers(x)
        return {"loss": out.square().mean(), "logits": out}


def weights(model: torch.nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def trainer(folder: Path, lr: float, **options: Any) -> Any:
    model = Network()
    generator = torch.Generator().manual_seed(1)
    data = [{"x": torch.randn(96, generator=generator), "labels": torch.zeros(1)} for _ in range(64)]
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=8, max_steps=6, save_steps=3, use_cpu=True, report_to=[]
    )
    optimizer = stquant.AdamW(model.named_parameters(), lr=lr, **options)
    return transformers.Trainer(model=model, args=arguments, train_dataset=data, optimizers=(optimizer, None))


def test_the_trainer_resumes_bit_for_bit(tmp_path: Path) -> None:
    straight = trainer(tmp_path / "a", 1e-2)
    straight.train()
    resumed = trainer(tmp_path / "b", 1.0, policy="fp32")
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-3"))
    assert resumed.state.global_step == 6
    assert equal(weights(straight.model), weights(resumed.model))


def test_accelerate_wraps_clips_and_restores(tmp_path: Path) -> None:
    outcomes = []
    for wrapped in (True, False):
        model = Network()
        optimizer: Any = stquant.AdamW(model.parameters(), lr=1e-2)
        schedule: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        accelerator = accelerate.Accelerator(cpu=True)
        if wrapped:
            model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
        for step in range(4):
            optimizer.zero_grad()
            loss = model(torch.randn(8, 96, generator=torch.Generator().manual_seed(step)))["loss"]
            if wrapped:
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            else:
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            if wrapped and step == 1:
                accelerator.save_state(str(tmp_path))
                accelerator.load_state(str(tmp_path))
        outcomes.append(weights(model))
    assert equal(*outcomes)
