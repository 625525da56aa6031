"""Arithmetic in fp32 for weights of any dtype, which is fast on processors without bf16 arithmetic."""

from __future__ import annotations

import itertools
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call


class ComputeInFloat32(nn.Module):
    """A model whose parameters have any dtype and whose arithmetic is fp32."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Tensor) -> Any:
        """Return what the model returns for the batch."""
        named = itertools.chain(self.model.named_parameters(), self.model.named_buffers())
        widened = {name: _widen(value) for name, value in named}
        return functional_call(self.model, widened, kwargs={key: _widen(value) for key, value in batch.items()})


def _widen(value: Tensor) -> Tensor:
    return value.float() if value.is_floating_point() else value
