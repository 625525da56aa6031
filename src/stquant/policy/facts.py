"""What a policy is told and what it answers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stquant.codecs.format import Format


@dataclass(frozen=True, slots=True)
class ParameterFacts:
    """What a policy may know of a parameter.

    Attributes:
        shape: Shape of the whole parameter, not of a rank's part.
        dtype: Its dtype.
        prepays: Whether its optimizer and its weights can take what a format rounds away at once.
        plain_bits: Fewest bits in which a signed state trains if it does not prepay.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    prepays: bool = True
    plain_bits: int = 4


@dataclass(frozen=True, slots=True)
class Choice:
    """A format for one state, and why it is not packed if it is not."""

    format: Format
    reason: str = ""
