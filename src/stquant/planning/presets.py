"""Models by name: the sizes that their authors published, as transformers configs.

A name is no download: the config classes ship with transformers, and the numbers stand here.
"""

from __future__ import annotations

from typing import Any

_LLAMA3 = {"model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8}

PRESETS: dict[str, dict[str, Any]] = {
    "gpt2": {"model_type": "gpt2"},
    "gpt2-medium": {"model_type": "gpt2", "n_embd": 1024, "n_layer": 24, "n_head": 16},
    "gpt2-large": {"model_type": "gpt2", "n_embd": 1280, "n_layer": 36, "n_head": 20},
    "gpt2-xl": {"model_type": "gpt2", "n_embd": 1600, "n_layer": 48, "n_head": 25},
    "llama-3.2-1b": {
        **_LLAMA3,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "tie_word_embeddings": True,
    },
    "llama-3.2-3b": {
        **_LLAMA3,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "tie_word_embeddings": True,
    },
    "llama-3.1-8b": {
        **_LLAMA3,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "llama-3.1-70b": {
        **_LLAMA3,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
    "mistral-7b": {"model_type": "mistral"},
    "bert-base": {"model_type": "bert"},
    "vit-base": {"model_type": "vit", "num_labels": 1000},
    "vit-large": {
        "model_type": "vit",
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_labels": 1000,
    },
    "clip-vit-base": {"model_type": "clip"},
}
"""Arguments of the config class by name; `model_type` chooses the class."""
