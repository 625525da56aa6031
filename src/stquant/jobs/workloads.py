"""What is trained: a byte-level GPT-2 on source text, a ViT on handwritten digits.

A workload draws its batch from the seed and the step alone, so that a resumed run sees the same
data as one that never stopped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stquant.jobs.data import handwritten_digits, standard_library_text

Batch = dict[str, Tensor]

GPT2_CONTEXT = 64


@dataclass(frozen=True, slots=True)
class Workload:
    """A model, its data and its recipe.

    Attributes:
        name: Name on the command line.
        build: Makes the model; initial weights follow torch's global seed.
        train_batch: Draws a batch from a generator.
        validation: Makes the held-out batches.
        steps: Steps of a full run.
        lr: Peak learning rate.
        betas: Decay rates of AdamW.
        weight_decay: Decoupled weight decay.
    """

    name: str
    build: Callable[[], nn.Module]
    train_batch: Callable[[torch.Generator], Batch]
    validation: Callable[[], list[Batch]]
    steps: int
    lr: float
    betas: tuple[float, float]
    weight_decay: float

    def batch(self, seed: int, step: int) -> Batch:
        """Return the training batch of a step."""
        return self.train_batch(torch.Generator().manual_seed((seed << 32) + step))


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=256,
        n_positions=GPT2_CONTEXT,
        n_embd=128,
        n_layer=2,
        n_head=4,
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


def _windows(text: Tensor, starts: Tensor) -> Batch:
    tokens = text[starts[:, None] + torch.arange(GPT2_CONTEXT)].long()
    return {"input_ids": tokens, "labels": tokens}


def _text_batch(generator: torch.Generator) -> Batch:
    text = standard_library_text().train
    return _windows(text, torch.randint(len(text) - GPT2_CONTEXT, (8,), generator=generator))


def _text_validation() -> list[Batch]:
    text = standard_library_text().validation
    starts = torch.linspace(0, len(text) - GPT2_CONTEXT - 1, 128).long()
    return [_windows(text, part) for part in torch.split(starts, 64)]


def _digit_batch(generator: torch.Generator) -> Batch:
    digits = handwritten_digits()
    chosen = torch.randint(len(digits.train), (32,), generator=generator)
    return {"pixel_values": digits.train[chosen], "labels": digits.train_labels[chosen]}


def _digit_validation() -> list[Batch]:
    digits = handwritten_digits()
    images, labels = torch.split(digits.validation, 250), torch.split(digits.validation_labels, 250)
    return [{"pixel_values": i, "labels": n} for i, n in zip(images, labels, strict=True)]


WORKLOADS = {
    "gpt2": Workload("gpt2", _gpt2, _text_batch, _text_validation, 600, 2e-3, (0.9, 0.95), 0.1),
    "vit": Workload("vit", _vit, _digit_batch, _digit_validation, 500, 1e-3, (0.9, 0.999), 0.05),
}
