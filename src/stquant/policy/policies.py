"""Policies: from what is known of a parameter to a format for each of its states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from stquant.codecs import catalog
from stquant.codecs.blocks import why_not_packed
from stquant.codecs.format import Format
from stquant.errors import FormatError


@dataclass(frozen=True, slots=True)
class ParameterFacts:
    """What a policy may know of a parameter.

    Attributes:
        shape: Shape of the whole parameter, not of a rank's part.
        dtype: Its dtype.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Choice:
    """A format for one state, and why it is not packed if it is not."""

    format: Format
    reason: str = ""


class Policy(Protocol):
    """What an optimizer asks of a policy."""

    def choose(self, facts: ParameterFacts, states: Mapping[str, bool]) -> dict[str, Choice]:
        """Choose a format for every state of a parameter.

        Args:
            facts: The parameter.
            states: The states' names, and whether they hold negative values.
        """
        ...

    def check(self, states: Mapping[str, bool]) -> None:
        """Raise if the policy does not fit an optimizer with these states."""
        ...

    def formats_of(self, states: Mapping[str, bool]) -> dict[str, Format]:
        """Return the format that each state has where a parameter can be packed."""
        ...

    def to_dict(self) -> dict[str, Any]:
        """Return the policy as numbers, strings and dicts."""
        ...


class Fixed:
    """Formats that never change.

    Args:
        bits: Width of every state that `formats` does not name: 2, 3, 4, 5, 6 or 8, the default
            formats of that width; 32 leaves states in fp32. None leaves them in fp32, too.
        block: Elements that share a scale: a power of two, at least 32.
        flat: Also pack 1-D parameters, as one row.
        formats: A format for each state by keyword: a name of the catalogue (`stquant formats`)
            or a width, for example `exp_avg="dynamic2", exp_avg_sq=1`.

    Raises:
        FormatError: A format, a width or a block size is unknown.
    """

    def __init__(self, bits: int | None = None, *, block: int = 128, flat: bool = False, **formats: str | int) -> None:
        self.bits = bits
        self.block = block
        self.flat = flat
        self.formats = dict(formats)
        catalog.FLOAT32.with_block(block)
        for choice in formats.values():
            if isinstance(choice, str):
                catalog.get(choice)

    def check(self, states: Mapping[str, bool]) -> None:
        """Raise `FormatError` if a named state does not exist or cannot have its format."""
        for name in self.formats:
            if name not in states:
                raise FormatError(f"the policy names state {name!r}; this optimizer has {', '.join(states)}")
        self.formats_of(states)

    def formats_of(self, states: Mapping[str, bool]) -> dict[str, Format]:
        """Return the format that each state has where a parameter can be packed."""
        return {name: self._format(name, signed) for name, signed in states.items()}

    def choose(self, facts: ParameterFacts, states: Mapping[str, bool]) -> dict[str, Choice]:
        """Choose the named formats, or fp32 for a parameter that cannot be packed."""
        reason = why_not_packed(facts.shape, self.block, self.flat)
        if facts.dtype is torch.float64:
            reason = "float64 parameter"
        choices = {}
        for name, format in self.formats_of(states).items():
            if not format.packed:
                choices[name] = Choice(format, "policy")
            else:
                choices[name] = Choice(catalog.FLOAT32, reason) if reason else Choice(format)
        return choices

    def to_dict(self) -> dict[str, Any]:
        """Return the arguments that make this policy again, and its kind."""
        return {"kind": "fixed", "bits": self.bits, "block": self.block, "flat": self.flat, "formats": self.formats}

    def _format(self, name: str, signed: bool) -> Format:
        choice = self.formats.get(name, self.bits)
        if choice is None:
            return catalog.FLOAT32
        if isinstance(choice, str):
            format = catalog.get(choice, self.block)
        else:
            format = catalog.default_for(choice, signed).with_block(self.block)
        if format.packed and format.signed != signed:
            kind = "signed" if signed else "non-negative"
            raise FormatError(
                f"format {format.name!r} does not fit {name}, which is {kind}; use one of "
                + ", ".join(f.name for f in catalog.formats() if f.packed and f.signed == signed)
            )
        return format

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Fixed) and self.to_dict() == other.to_dict()

    def __hash__(self) -> int:
        return hash(repr(self))

    def __repr__(self) -> str:
        shown = [] if self.bits is None else [f"bits={self.bits}"]
        shown += [f"block={self.block}"] if self.block != 128 else []
        shown += ["flat=True"] if self.flat else []
        shown += [f"{name}={choice!r}" for name, choice in self.formats.items()]
        return f"Fixed({', '.join(shown)})"


_NAMED = {"fp32": Fixed(bits=32)}


def parse(policy: Policy | str) -> Policy:
    """Return the policy that a name stands for; an object is returned as it is.

    Raises:
        ValueError: The name is unknown.
        TypeError: `policy` is neither a name nor a policy.
    """
    if isinstance(policy, str):
        if policy not in _NAMED:
            raise ValueError(
                f"policy={policy!r} is unknown; use one of {sorted(_NAMED)} or an object such as stquant.Fixed(bits=4)"
            )
        return _NAMED[policy]
    if not hasattr(policy, "choose"):
        raise TypeError(f"policy={policy!r} is not a policy; use for example stquant.Fixed(bits=4)")
    return policy


def from_dict(data: Mapping[str, Any]) -> Policy:
    """Return the policy that `to_dict` described.

    Raises:
        ValueError: The kind is unknown to this version.
    """
    if data.get("kind") != "fixed":
        raise ValueError(f"policy of kind {data.get('kind')!r} is unknown to this version; it knows 'fixed'")
    return Fixed(data["bits"], block=data["block"], flat=data["flat"], **data["formats"])
