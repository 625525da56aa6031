"""Real runs under trainers: train, save, be killed, resume in a new process; compared bit for bit."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.integrations.forks import Forks
from tests.integrations.tables import OPTIMIZERS


def needs(*packages: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not all(map(find_spec, packages)), reason=f"needs {', '.join(packages)}")


@needs("accelerate", "peft")
@pytest.mark.parametrize("model", ["gpt2", "bf16", "lora", "vit"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_trainer_resumes_exactly(forks: Forks, model: str, optimizer: str, tmp_path: Path) -> None:
    forks.kill("hugging_face.killed", tmp_path, model, optimizer)
    forks("hugging_face.resumed", tmp_path, model, optimizer)


@needs("accelerate", "peft")
def test_trainer_logs_the_ledger(forks: Forks, tmp_path: Path) -> None:
    forks("hugging_face.logged", tmp_path)
    assert "the optimizer is torch.optim.adamw.AdamW, which has no ledger" in forks("hugging_face.refused", tmp_path)


@needs("accelerate")
@pytest.mark.parametrize("ranks", [1, 2])
def test_accelerate_resumes_exactly(forks: Forks, ranks: int, tmp_path: Path) -> None:
    forks.kill("accelerating.killed", tmp_path, ranks=ranks)
    assert forks("accelerating.resumed", tmp_path, ranks, ranks=ranks) == dict.fromkeys(OPTIMIZERS, True)


@needs("lightning")
@pytest.mark.parametrize("ranks", [1, 2], ids=["plain", "fsdp2"])
def test_lightning_resumes_exactly(forks: Forks, ranks: int, tmp_path: Path) -> None:
    forks.kill("lightnings.killed", tmp_path, ranks, ranks=ranks)
    assert forks("lightnings.resumed", tmp_path, ranks, ranks=ranks) == dict.fromkeys([*OPTIMIZERS, "log"], True)


@needs("lightning")
def test_lightning_logs_the_ledger(forks: Forks, tmp_path: Path) -> None:
    forks("lightnings.logged", tmp_path)
    assert "the module has 0 optimizers of stquant (1 in all)" in forks("lightnings.refused", tmp_path)


@needs("torchtitan")
def test_torchtitan_container_resumes_exactly(forks: Forks) -> None:
    assert forks("titan.resumed") == dict.fromkeys(OPTIMIZERS, True)


@needs("torchtune")
def test_torchtune_makes_the_component(forks: Forks) -> None:
    assert forks("tuning.goes_on_as_if_made_by_hand")
