"""What is trained: a byte-level GPT-2 on source text, a ViT on handwritten digits, a CLIP on both sides.

A workload draws its batch from the seed and the step alone, so that a resumed run sees the same
data as one that never stopped.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from stquant.jobs.data import captions, handwritten_digits, standard_library_text

Batch = dict[str, Tensor]

GPT2_CONTEXT = 64
HELD_OUT_SETS = 25
"""Sets of ten digits on which CLIP is validated."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A model, its data and its recipe.

    Attributes:
        name: Name on the command line.
        build: Makes the model; initial weights follow torch's global seed.
        train_batch: Draws a batch from a generator.
        validation: Makes the held-out batches.
        losses: From a model's output and its batch to the loss of each example, fp32 `[n]`; their
            mean is the model's own loss.
        steps: Steps of a full run.
        lr: Peak learning rate.
        betas: Decay rates of AdamW.
        weight_decay: Decoupled weight decay.
    """

    name: str
    build: Callable[[], nn.Module]
    train_batch: Callable[[torch.Generator], Batch]
    validation: Callable[[], list[Batch]]
    losses: Callable[[Any, Batch], Tensor]
    steps: int
    lr: float
    betas: tuple[float, float]
    weight_decay: float

    def batch(self, seed: int, step: int) -> Batch:
        """Return the training batch of a step."""
        return self.train_batch(torch.Generator().manual_seed((seed << 32) + step))


def gpt2(width: int = 128, layers: int = 2, heads: int = 4, vocabulary: int = 256) -> nn.Module:
    """Return transformers' GPT-2 without dropout, for windows of `GPT2_CONTEXT` tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=GPT2_CONTEXT,
        n_embd=width,
        n_layer=layers,
        n_head=heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # what it falls back to, with a warning
    return model  # type: ignore[no-any-return]


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=28,
        patch_size=7,
        num_channels=1,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=512,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=10,
    )
    model: nn.Module = ViTForImageClassification(config)
    return model


def _clip() -> nn.Module:
    from transformers import CLIPConfig, CLIPModel

    tower = {"hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {"vocab_size": 128, "max_position_embeddings": 40, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    vision = {"image_size": 28, "patch_size": 7, "num_channels": 1}
    model: nn.Module = CLIPModel(
        CLIPConfig(text_config={**tower, **text}, vision_config={**tower, **vision}, projection_dim=64)
    )
    return model


def windows(text: Tensor, starts: Tensor) -> Batch:
    """Return the windows of a text that begin at `starts`, as inputs and labels."""
    tokens = text[starts[:, None] + torch.arange(GPT2_CONTEXT)].long()
    return {"input_ids": tokens, "labels": tokens}


def _text_batch(generator: torch.Generator) -> Batch:
    text = standard_library_text().train
    return windows(text, torch.randint(len(text) - GPT2_CONTEXT, (8,), generator=generator))


def _text_validation() -> list[Batch]:
    text = standard_library_text().validation
    starts = torch.linspace(0, len(text) - GPT2_CONTEXT - 1, 128).long()
    return [windows(text, part) for part in torch.split(starts, 64)]


def _digit_batch(generator: torch.Generator) -> Batch:
    digits = handwritten_digits()
    chosen = torch.randint(len(digits.train), (32,), generator=generator)
    return {"pixel_values": digits.train[chosen], "labels": digits.train_labels[chosen]}


def _digit_validation() -> list[Batch]:
    digits = handwritten_digits()
    images, labels = torch.split(digits.validation, 250), torch.split(digits.validation_labels, 250)
    return [{"pixel_values": i, "labels": n} for i, n in zip(images, labels, strict=True)]


def _caption_batch(generator: torch.Generator) -> Batch:
    """One image of each digit, so that every caption has one right image."""
    of_digit = _images_of_each_digit(held_out=False)
    chosen = torch.stack([of[torch.randint(len(of), (), generator=generator)] for of in of_digit])
    return _captioned(handwritten_digits().train[chosen], torch.randint(1 << 16, (10,), generator=generator))


def caption_validation(sets: int | None = HELD_OUT_SETS) -> list[Batch]:
    """Return sets of ten held-out digits with their captions; all there are if `sets` is None."""
    images = handwritten_digits().validation
    of_digit = _images_of_each_digit(held_out=True)
    count = min(map(len, of_digit)) if sets is None else sets
    return [
        _captioned(images[torch.stack([of[position] for of in of_digit])], torch.arange(10) + position)
        for position in range(count)
    ]


def _captioned(images: Tensor, wording: Tensor) -> Batch:
    """Images of the digits 0 to 9 with a caption each, in one of several wordings."""
    texts = captions()
    return {
        "pixel_values": images,
        "input_ids": texts[wording % len(texts), torch.arange(10)],
        "return_loss": torch.tensor(True),
    }


@functools.cache
def _images_of_each_digit(held_out: bool) -> list[Tensor]:
    digits = handwritten_digits()
    labels = digits.validation_labels if held_out else digits.train_labels
    return [torch.nonzero(labels == digit).flatten() for digit in range(10)]


def _token_losses(output: Any, batch: Batch) -> Tensor:
    """Mean loss over the tokens of each window."""
    logits, targets = output.logits[:, :-1], batch["labels"][:, 1:]
    return functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none").mean(1)


def _class_losses(output: Any, batch: Batch) -> Tensor:
    return functional.cross_entropy(output.logits, batch["labels"], reduction="none")


def _pair_losses(output: Any, batch: Batch) -> Tensor:
    """Mean of both directions: the caption's image among all, and the image's caption."""
    logits, own = output.logits_per_text, torch.arange(len(output.logits_per_text))
    both = (functional.cross_entropy(side, own, reduction="none") for side in (logits, logits.t()))
    return sum(both, torch.zeros(())) / 2


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("gpt2", gpt2, _text_batch, _text_validation, _token_losses, 600, 2e-3, (0.9, 0.95), 0.1),
        Workload("vit", _vit, _digit_batch, _digit_validation, _class_losses, 500, 1e-3, (0.9, 0.999), 0.05),
        Workload("clip", _clip, _caption_batch, caption_validation, _pair_losses, 500, 1e-3, (0.9, 0.98), 0.1),
    )
}
