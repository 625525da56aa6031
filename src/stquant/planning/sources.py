"""Where the parameters of a plan come from; none of them ever has memory.

A model is a name (`presets`, or any model type of transformers), a local `config.json` or the
folder that holds one, `package.module:factory`, or a checkpoint, which gives shapes alone.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stquant.checkpoint import foreign
from stquant.checkpoint.convert import shapes_of
from stquant.errors import did_you_mean
from stquant.planning.presets import PRESETS

_HEADS = ("SpeechSeq2Seq", "Seq2SeqLM", "CausalLM", "ZeroShotImageClassification", "ImageClassification", "MaskedLM")
"""Tasks whose class is taken for a config that names none, the first that has one."""

_SAFETENSORS = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True, slots=True)
class Blueprint:
    """A model's parameters on the meta device.

    Attributes:
        name: What it is, for titles.
        parameters: Parameters by name, shared ones once; those without `requires_grad` are frozen.
        buffers: Buffers, shared ones once.
    """

    name: str
    parameters: Sequence[tuple[str, nn.Parameter]]
    buffers: Sequence[Tensor]

    def to(self, dtype: torch.dtype | None) -> Blueprint:
        """Return the same model with floating parameters and buffers in `dtype`; None changes nothing."""
        if dtype is None:
            return self
        parameters = [(name, _parameter(p.shape, _cast(p, dtype), p.requires_grad)) for name, p in self.parameters]
        return Blueprint(self.name, parameters, [_empty(b.shape, _cast(b, dtype)) for b in self.buffers])


def blueprint(model: str) -> Blueprint:
    """Return the parameters of what a command line calls a model.

    Raises:
        ValueError: There is no such model, or its file or factory cannot be read.
    """
    path = Path(model)
    if path.is_dir() and (path / "config.json").exists():
        return _from_config_file(path / "config.json")
    if path.is_file():
        if path.name.endswith(".index.json"):
            return _from_index(path)
        readers: dict[str, Callable[[Path], Blueprint]] = {
            ".json": _from_config_file,
            ".safetensors": _from_safetensors,
        }
        return readers.get(path.suffix, _from_torch)(path)
    if ":" in model:
        return _from_factory(model)
    return _from_name(model)


def of_module(name: str, module: nn.Module) -> Blueprint:
    """Return the parameters of a module, wherever it lives; it is not changed."""
    parameters = [(key, _parameter(p.shape, p.dtype, p.requires_grad)) for key, p in module.named_parameters()]
    return Blueprint(name, parameters, [_empty(b.shape, b.dtype) for b in module.buffers()])


def _from_name(name: str) -> Blueprint:
    transformers = _transformers()
    if name in PRESETS:
        options = dict(PRESETS[name])
    elif name in transformers.CONFIG_MAPPING:
        options = {"model_type": name}
    else:
        raise ValueError(
            f"model {name!r} is unknown; use one of {', '.join(PRESETS)}, a model type of transformers, "
            "a config.json, a checkpoint, or package.module:factory"
            + did_you_mean(name, PRESETS.keys() | transformers.CONFIG_MAPPING.keys())
        )
    return _of_config(name, transformers.AutoConfig.for_model(**options))


def _from_config_file(path: Path) -> Blueprint:
    transformers = _transformers()
    try:
        config = transformers.AutoConfig.for_model(**json.loads(path.read_text()))
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is not a config of a model that transformers knows ({error})") from error
    return _of_config(str(path), config)


def _of_config(name: str, config: Any) -> Blueprint:
    transformers = _transformers()
    named = getattr(transformers, (getattr(config, "architectures", None) or [""])[0], None)
    with torch.device("meta"):
        if named is not None:
            return of_module(f"{name} ({named.__name__})", named(config))
        for auto in (*(getattr(transformers, f"AutoModelFor{head}") for head in _HEADS), transformers.AutoModel):
            if type(config) in auto._model_mapping:
                module = auto.from_config(config, dtype=torch.float32)
                return of_module(f"{name} ({type(module).__name__})", module)
    raise ValueError(f"{name}: transformers has no model for a {type(config).__name__}")


def _from_factory(text: str) -> Blueprint:
    module_name, _, attribute = text.partition(":")
    try:
        with _here_importable():
            factory = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{text!r} cannot be imported ({error}); give package.module:factory") from error
    with torch.device("meta"):
        module = factory()
    if not isinstance(module, nn.Module):
        raise ValueError(f"{text!r} returned {type(module).__name__}, expected a torch.nn.Module")
    return of_module(text, module)


def _from_safetensors(path: Path) -> Blueprint:
    """Read the header alone: its length in 8 bytes, little-endian, then JSON."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        try:
            header = json.loads(file.read(length) if length < path.stat().st_size else b"")
        except ValueError as error:
            raise ValueError(f"{path} is not a safetensors file: its header cannot be read") from error
    floats = {name: part for name, part in header.items() if part.get("dtype") in _SAFETENSORS}
    return Blueprint(
        str(path), [(name, _parameter(p["shape"], _SAFETENSORS[p["dtype"]])) for name, p in floats.items()], []
    )


def _from_index(path: Path) -> Blueprint:
    """Read the parts of a checkpoint that an index lists."""
    parts = sorted(set(json.loads(path.read_text())["weight_map"].values()))
    blueprints = [blueprint(str(path.parent / part)) for part in parts]
    return Blueprint(str(path), [named for part in blueprints for named in part.parameters], [])


def _from_torch(path: Path) -> Blueprint:
    saved = foreign.load(path, mapped=True)
    if not isinstance(saved, dict):
        raise ValueError(f"{path} holds {type(saved).__name__}, expected the state dict of a model")
    if "param_groups" in saved:
        raise ValueError(f"{path} is the checkpoint of an optimizer; give that of the model, or use stquant inspect")
    shapes = shapes_of(saved)
    return Blueprint(str(path), [(name, _parameter(shape, saved[name].dtype)) for name, shape in shapes.items()], [])


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise ValueError("models by name and by config need transformers; pip install 'stquant[demo]'") from error


@contextmanager
def _here_importable() -> Iterator[None]:
    """Let modules of the working folder be imported, as `python -m` does."""
    sys.path.insert(0, "")
    try:
        yield
    finally:
        sys.path.remove("")


def _cast(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    return dtype if tensor.is_floating_point() else tensor.dtype


def _empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


def _parameter(shape: Sequence[int], dtype: torch.dtype, trained: bool = True) -> nn.Parameter:
    return nn.Parameter(_empty(shape, dtype), requires_grad=trained)
