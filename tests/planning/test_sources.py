"""Where parameters come from: names, configs, factories and checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stquant.planning import sources
from stquant.planning.presets import PRESETS
from tests.planning import models

pytestmark = pytest.mark.filterwarnings("default")

PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "mistral-7b": 7_241_732_096,
    "vit-base": 86_567_656,
    "vit-large": 304_326_632,
    "clip-vit-base": 151_277_313,
}
"""Parameters of the checkpoints that the authors published under these names."""


def shapes(model: nn.Module) -> dict[str, tuple[Any, ...]]:
    return {name: (tuple(p.shape), p.dtype, p.requires_grad) for name, p in model.named_parameters()}


def found(blueprint: sources.Blueprint) -> dict[str, tuple[Any, ...]]:
    assert all(p.device.type == "meta" for _, p in blueprint.parameters)
    return {name: (tuple(p.shape), p.dtype, p.requires_grad) for name, p in blueprint.parameters}


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_have_the_published_number_of_parameters(name: str) -> None:
    blueprint = sources.blueprint(name)
    assert sum(p.numel() for _, p in blueprint.parameters) == PUBLISHED[name]


def test_every_preset_is_checked_or_a_default_of_transformers() -> None:
    assert all(name in PUBLISHED or len(options) == 1 for name, options in PRESETS.items())
    assert len(sources.blueprint("bert-base").parameters) > 100
    assert sources.blueprint("t5").name == "t5 (T5ForConditionalGeneration)"


def test_a_config_file_or_its_folder_names_the_class(tmp_path: Path) -> None:
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **models.LLAMA}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for path in (tmp_path, tmp_path / "config.json"):
        assert found(sources.blueprint(str(path))) == shapes(models.llama())


def test_a_factory_is_imported_also_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(sources.blueprint("tests.planning.models:partly_frozen")) == shapes(models.partly_frozen())
    (tmp_path / "just_here.py").write_text("from torch import nn\ndef make(): return nn.Linear(3, 4)\n")
    monkeypatch.chdir(tmp_path)
    assert found(sources.blueprint("just_here:make")) == shapes(nn.Linear(3, 4))


def test_checkpoints_give_shapes_and_ties(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model = models.gpt2().bfloat16()
    torch.save(model.state_dict(), tmp_path / "model.pt")
    assert found(sources.blueprint(str(tmp_path / "model.pt"))) == shapes(model)
    tensors = {name: p.detach() for name, p in model.named_parameters()} | {"mask": torch.ones(3, dtype=torch.bool)}
    first, second = dict(list(tensors.items())[:5]), dict(list(tensors.items())[5:])
    save_file(first, tmp_path / "1.safetensors")
    save_file(second, tmp_path / "2.safetensors")
    weight_map = {name: f"{1 + (name in second)}.safetensors" for name in tensors}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert found(sources.blueprint(str(tmp_path / "model.safetensors.index.json"))) == shapes(model)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpt2-medum", "did you mean gpt2-medium"),
        ("nowhere:make", "cannot be imported"),
        ("stquant:no_such", "cannot be imported"),
        ("builtins:dict", r"returned dict, expected a torch\.nn\.Module"),
        ("broken.safetensors", "not a safetensors file"),
        ("broken.json", "not a config"),
        ("optimizer.pt", "checkpoint of an optimizer"),
        ("list.pt", "holds list"),
    ],
)
def test_errors_say_what_to_give(text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0 no header at all")
    Path("broken.json").write_text("{}")
    torch.save(torch.optim.AdamW([nn.Parameter(torch.zeros(1))]).state_dict(), "optimizer.pt")
    torch.save([torch.zeros(1)], "list.pt")
    with pytest.raises(ValueError, match=message):
        sources.blueprint(text)
