"""Policies: from what is known of a parameter to a format for each of its states."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from stquant.codecs import catalog
from stquant.codecs.blocks import why_not_packed
from stquant.codecs.format import Format
from stquant.errors import FormatError, did_you_mean
from stquant.policy.budget import Adaptive, Budget, Tolerance
from stquant.policy.facts import Choice, ParameterFacts


class Policy(Protocol):
    """What an optimizer asks of a policy.

    A class of your own needs these four methods, and `register_policy`. `choose` is asked again
    whenever an optimizer reports or loads, so it must always give the same answer to the same facts.
    """

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


class Unchanging:
    """What policies share whose formats never change: `formats_of`, `block` and `flat` decide."""

    block: int
    flat: bool

    def formats_of(self, states: Mapping[str, bool]) -> dict[str, Format]:
        """Return the format that each state has where a parameter can be packed."""
        raise NotImplementedError

    def choose(self, facts: ParameterFacts, states: Mapping[str, bool]) -> dict[str, Choice]:
        """Choose those formats, or fp32 for a parameter that cannot be packed."""
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


class Fixed(Unchanging):
    """Formats that never change.

    Args:
        bits: Width of every state that `formats` does not name: 2, 3, 4, 5, 6 or 8, the default
            formats of that width; 32 leaves states in fp32. None leaves them in fp32, too.
        block: Elements that share a scale: a power of two, at least 32. None takes that of the
            formats: 128, or what a recipe's format has.
        flat: Also pack 1-D parameters, as one row.
        formats: A format for each state by keyword: a name of the catalogue (`stquant formats`)
            or a width, for example `exp_avg="dynamic2", exp_avg_sq=1`.

    Raises:
        FormatError: A format, a width or a block size is unknown, or formats whose block sizes
            differ are combined without `block`.
    """

    def __init__(
        self, bits: int | None = None, *, block: int | None = None, flat: bool = False, **formats: str | int
    ) -> None:
        self.bits = bits
        self.flat = flat
        self.formats = dict(formats)
        sizes = self._own_blocks()
        if block is None and len(set(sizes.values())) > 1:
            shown = ", ".join(f"{name}: {size}" for name, size in sizes.items())
            raise FormatError(f"the formats have blocks of several sizes ({shown}); choose one, for example block=128")
        self.block = next(iter(sizes.values()), 128) if block is None else block
        self._block_is_own = set(sizes.values()) <= {self.block} and (self.block == 128 or bool(sizes))
        catalog.FLOAT32.with_block(self.block)

    def check(self, states: Mapping[str, bool]) -> None:
        """Raise `FormatError` if a named state does not exist or cannot have its format."""
        for name in self.formats:
            if name not in states:
                raise FormatError(f"the policy names state {name!r}; this optimizer has {', '.join(states)}")
        self.formats_of(states)

    def formats_of(self, states: Mapping[str, bool]) -> dict[str, Format]:
        """Return the format that each state has where a parameter can be packed."""
        return {name: self._format(name, signed) for name, signed in states.items()}

    def to_dict(self) -> dict[str, Any]:
        """Return the arguments that make this policy again, and its kind."""
        return {"kind": "fixed", "bits": self.bits, "block": self.block, "flat": self.flat, "formats": self.formats}

    def _own_blocks(self) -> dict[str, int]:
        """Block size of each format and width that was asked for."""
        named = [catalog.get(choice) for choice in self.formats.values() if isinstance(choice, str)]
        widths = [self.bits, *(choice for choice in self.formats.values() if isinstance(choice, int))]
        sizes = {format.name: format.block for format in named if format.packed}
        return sizes | {f"{bits} bits": 128 for bits in widths if bits not in (None, 32)}

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
        shown += [] if self._block_is_own else [f"block={self.block}"]
        shown += ["flat=True"] if self.flat else []
        shown += [f"{name}={choice!r}" for name, choice in self.formats.items()]
        return f"Fixed({', '.join(shown)})"


class Recipe(Unchanging):
    """A published recipe: one format for signed states, one for non-negative ones.

    Args:
        name: "bnb8", "torchao4", "flash8", "solo42" or "nf4".

    Raises:
        ValueError: The name is unknown.
    """

    _FORMATS = {
        "bnb8": ("dynamic8", "udynamic8"),
        "torchao4": ("dynamic4", "linear4"),
        "flash8": ("softsign8", "sqrt8"),
        "solo42": ("dynamic4", "solo2"),
        "nf4": ("nf4", "linear4"),
    }
    NAMES = tuple(_FORMATS)
    flat = False

    def __init__(self, name: str) -> None:
        if name not in self._FORMATS:
            raise ValueError(
                f"recipe {name!r} is unknown; use one of {', '.join(self.NAMES)}{did_you_mean(name, self.NAMES)}"
            )
        self.name = name
        self._signed, self._non_negative = map(catalog.get, self._FORMATS[name])
        self.block = self._signed.block

    def check(self, states: Mapping[str, bool]) -> None:
        """Accept any states."""

    def formats_of(self, states: Mapping[str, bool]) -> dict[str, Format]:
        """Return the format that each state has where a parameter can be packed."""
        return {name: self._signed if signed else self._non_negative for name, signed in states.items()}

    def to_dict(self) -> dict[str, Any]:
        """Return kind and name."""
        return {"kind": "recipe", "name": self.name}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Recipe) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return f"Recipe({self.name!r})"


_NAMED: dict[str, Policy] = {
    "adaptive": Adaptive(),
    "fp32": Fixed(bits=32),
    **{name: Recipe(name) for name in Recipe.NAMES},
}

NAMES = tuple(_NAMED)
"""Policies that can be chosen by name."""


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
                + did_you_mean(policy, _NAMED)
            )
        return _NAMED[policy]
    if missing := [name for name in _CONTRACT if not callable(getattr(policy, name, None))]:
        raise TypeError(
            f"policy={policy!r} is not a policy, it lacks {', '.join(missing)}; use for example stquant.Fixed(bits=4)"
        )
    if policy.to_dict().get("kind") not in _KINDS:
        raise ValueError(
            f"policy={policy!r} is of a kind that is not registered; call stquant.register_policy(kind, make) "
            "with the kind of its to_dict()"
        )
    return policy


def register_policy(kind: str, make: Callable[..., Policy]) -> None:
    """Make a kind of policy of your own known, so that optimizers and their checkpoints can hold it.

    An optimizer keeps what `to_dict()` returns in its parameter groups and in its files, and makes
    the policy anew from there. A process that loads such a file must have registered the kind.

    Args:
        kind: What the policy's `to_dict()` has under "kind".
        make: Makes the policy from the other entries of `to_dict()`, given by keyword; mostly its class.

    Raises:
        ValueError: The kind stands for another policy already.
    """
    if kind in _KINDS:
        raise ValueError(f"policy kind {kind!r} is taken, as are {', '.join(map(repr, _KINDS))}; choose another name")
    _KINDS[kind] = lambda data: make(**data)


def from_dict(data: Mapping[str, Any]) -> Policy:
    """Return the policy that `to_dict` described.

    Raises:
        ValueError: The kind is unknown.
    """
    kind = data.get("kind")
    if kind not in _KINDS:
        known = ", ".join(map(repr, _KINDS))
        raise ValueError(
            f"policy of kind {kind!r} is unknown; known are {known}. If it is one of your own, import the module "
            "that registers it first; if not, update stquant"
        )
    return _KINDS[kind]({key: value for key, value in data.items() if key != "kind"})


_CONTRACT = ("choose", "check", "formats_of", "to_dict")

_KINDS: dict[Any, Callable[[dict[str, Any]], Policy]] = {
    "fixed": lambda data: Fixed(**{key: value for key, value in data.items() if key != "formats"}, **data["formats"]),
    "recipe": lambda data: Recipe(**data),
    "adaptive": lambda data: Adaptive(**data),
    "budget": lambda data: Budget(**data),
    "tolerance": lambda data: Tolerance(**data),
}
"""Makes a policy of each kind from the other entries of its `to_dict()`."""
