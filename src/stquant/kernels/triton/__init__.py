"""Triton kernels for GPUs, CUDA and ROCm: one launch per combination of formats and dtypes.

Importing this package does not import triton, so stquant works where that is not installed;
`launch` does. TRITON_INTERPRET=1 in the environment makes the kernels run on CPU tensors, slowly:
that is how they are tested without a GPU.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys

import torch

SERVES = (
    "fp32, bf16 and fp16 parameters and gradients on a GPU, contiguous; "
    "states of the families dynamic, mulaw and log in blocks of 32 to 1024; whole or sharded; "
    "not what adaptive policies measure"
)
"""What the kernels take; the rest is worked on by the reference."""


def why_not_available() -> str | None:
    """Say why the kernels cannot be used, or None if they can."""
    if not _is_installed():
        return "triton is not installed: pip install triton"
    if has_gpu() or interpreted():
        return None
    return "torch finds no GPU (TRITON_INTERPRET=1 runs these kernels on CPU tensors, slowly)"


@functools.lru_cache(maxsize=1)
def has_gpu() -> bool:
    """Whether torch can use a GPU of CUDA or ROCm."""
    return torch.cuda.is_available()


def interpreted() -> bool:
    """Whether the kernels are, or would now be, loaded into triton's interpreter."""
    loaded = sys.modules.get(f"{__name__}.serving")
    return loaded.INTERPRETED if loaded is not None else os.environ.get("TRITON_INTERPRET") == "1"


@functools.lru_cache(maxsize=1)
def _is_installed() -> bool:
    try:
        return importlib.util.find_spec("triton") is not None
    except ValueError:  # something has put a stand-in among the modules
        return False
