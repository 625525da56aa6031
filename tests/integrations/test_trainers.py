"""Real runs under trainers: train, save, be killed, resume in a new process; compared bit for bit."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.integrations.forks import Forks
from tests.integrations.tables import OPTIMIZERS

hugging_face = pytest.mark.skipif(not find_spec("accelerate") or not find_spec("peft"), reason="accelerate and peft")


@hugging_face
@pytest.mark.parametrize("model", ["gpt2", "bf16", "lora", "vit"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_trainer_resumes_exactly(forks: Forks, model: str, optimizer: str, tmp_path: Path) -> None:
    forks.kill("hugging_face.killed", tmp_path, model, optimizer)
    forks("hugging_face.resumed", tmp_path, model, optimizer)
