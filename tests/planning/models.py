"""Small models of many kinds, made anew at each call."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=97, n_positions=32, n_embd=64, n_layer=1, n_head=2))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**LLAMA))


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(image_size=28, patch_size=7, **_ENCODER))


def clip() -> nn.Module:
    from transformers import CLIPConfig, CLIPModel

    text = {**_ENCODER, "vocab_size": 99, "max_position_embeddings": 16}
    vision = {**_ENCODER, "image_size": 32, "patch_size": 8}
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=32))


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 40, 5), nn.BatchNorm2d(40), nn.Conv2d(40, 33, 3), nn.Flatten(), nn.Linear(77, 65))


def partly_frozen() -> nn.Module:
    model = gpt2()
    for name, param in model.named_parameters():
        param.requires_grad_("mlp" in name)
    return model


def odd_shapes() -> nn.Module:
    shapes = [(5, 1031), (129, 33), (7, 3, 211), (4097,), (0, 5), (), (65, 64)]
    return nn.ParameterList([torch.zeros(shape) for shape in shapes])


LLAMA: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_ENCODER = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 1, "num_attention_heads": 2}
