"""Who shares a budget, and what each of its states costs in every format that it could have."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from stquant.checkpoint.restore import Named, named
from stquant.checkpoint.schema import CONTROL, GROUP_KEY, read_group
from stquant.codecs.blocks import Grid
from stquant.codecs.format import Format
from stquant.codecs.packing import packed_bytes
from stquant.policy.budget import WIDTHS, AdaptivePolicy, Holdings
from stquant.policy.factors import Averages
from stquant.policy.facts import Choice, ParameterFacts
from stquant.storage.packed import PackedState

AGE, MOVED = len(WIDTHS), len(WIDTHS) + 1
"""Columns of a control tensor after the damages by width: decisions since the last change, -1 for
a state that was never measured, and the squared step of the weight; all at a learning rate of 1."""


def fresh_control(states: Mapping[str, bool]) -> Tensor:
    """Return the control tensor of a parameter that was never measured, fp32 `[states, 10]`."""
    control = torch.zeros(len(states), len(WIDTHS) + 2, dtype=torch.float32)
    control[:, AGE] = -1.0
    return control


@dataclass(frozen=True, slots=True)
class Member:
    """One parameter of a pool.

    Attributes:
        entry: The parameter.
        facts: What the policy may know of it.
        states: Names of its states, and whether they are signed.
        residual_bits: Bits of its residual, 0 for none.
    """

    entry: Named
    facts: ParameterFacts
    states: Mapping[str, bool]
    residual_bits: int


@dataclass(frozen=True, slots=True)
class Seat:
    """One packed state of a pool.

    Attributes:
        entry: Its parameter.
        name: Its name.
        signed: Whether it holds negative values.
        grid: Its block grid.
        ladder: The formats that it may have, by growing width.
        sizes: Its bytes in each.
        row: Its row of the parameter's control tensor.
    """

    entry: Named
    name: str
    signed: bool
    grid: Grid
    ladder: tuple[Format, ...]
    sizes: tuple[int, ...]
    row: int

    def column(self, live: Mapping[Tensor, Mapping[str, Any]]) -> int:
        """Position in the ladder of the format that the state has, or of the next narrower one."""
        bits = self.state(live).format.bits
        return max((place for place, format in enumerate(self.ladder) if format.bits <= bits), default=0)

    def state(self, live: Mapping[Tensor, Mapping[str, Any]]) -> PackedState:
        """The state as it is now."""
        return cast("PackedState", live[self.entry.param][self.name])

    def control(self, live: Mapping[Tensor, Mapping[str, Any]]) -> Tensor:
        """The numbers of the state's past, a view."""
        return cast("Tensor", live[self.entry.param][CONTROL])[self.row]


class Pool:
    """Parameters that share a limit.

    Args:
        policy: Their policy.
        groups: The parameter groups that are part of it.
        members: The parameters that have states, or are to have them.
    """

    def __init__(self, policy: AdaptivePolicy, groups: Sequence[dict[str, Any]], members: Sequence[Member]) -> None:
        self.policy = policy
        self.groups = groups
        self.members = members
        self.plain = {m.entry.param: policy.choose(m.facts, m.states) for m in members}
        """For each parameter the smallest formats; tells what stays in fp32."""
        self.holdings = self._holdings()
        self.limit = policy.limit(self.holdings)
        self.seats = self._seats()

    @property
    def least(self) -> int:
        """Bytes of all packed states in their smallest formats."""
        return sum(seat.sizes[0] for seat in self.seats)

    def candidates(self, member: Member) -> dict[str, tuple[Format, ...]]:
        """Return every format that a member's states may ever have."""
        return {name: self.policy.ladder(member.facts, signed) for name, signed in member.states.items()}

    @property
    def averages(self) -> Averages:
        """Moving averages of the pool, as its groups hold them."""
        return Averages(*read_group(self.groups[0][GROUP_KEY]).averages)

    def remember(self, averages: Averages) -> None:
        """Keep moving averages in the pool's groups."""
        for group in self.groups:
            config = replace(
                read_group(group[GROUP_KEY]), averages=(averages.gradient_rms, averages.gradient_dispersion)
            )
            group[GROUP_KEY] = config.dump()

    def _seats(self) -> list[Seat]:
        seats = []
        for member in self.members:
            for row, (name, signed) in enumerate(member.states.items()):
                if self.plain[member.entry.param][name].format.packed:
                    ladder = self.policy.ladder(member.facts, signed)
                    grid = Grid.of(member.facts.shape, self.policy.block)
                    sizes = tuple(map(_Sizes(grid).of, ladder))
                    seats.append(Seat(member.entry, name, signed, grid, ladder, sizes, row))
        return seats

    def _holdings(self) -> Holdings:
        parameters = state_elements = plain = residual = compact = packed = 0
        for member in self.members:
            elements = member.entry.param.numel()
            grid = Grid.of(member.facts.shape, self.policy.block)
            choices = self.plain[member.entry.param]
            parameters += elements
            state_elements += elements * len(choices)
            plain += 4  # the step count
            plain += 4 * fresh_control(member.states).numel() if _any_packed(choices) else 0
            if member.residual_bits:
                residual += grid.rows * packed_bytes(grid.row, member.residual_bits)
            for name, choice in choices.items():
                if choice.format.packed:
                    packed += elements
                    ladder = self.policy.ladder(member.facts, member.states[name])
                    compact += _Sizes(grid).of(ladder[0])
                else:
                    plain += elements * (8 if member.facts.dtype is torch.float64 else 4)
        return Holdings(parameters, state_elements, plain, residual, compact, packed)


def pools(groups: Sequence[dict[str, Any]], members: Mapping[Tensor, Member]) -> list[Pool]:
    """Return the pools of an optimizer: groups that share the optimizer's policy, others alone.

    Args:
        groups: The parameter groups.
        members: The parameters that count.
    """
    shared: dict[str, list[dict[str, Any]]] = {}
    for position, group in enumerate(groups):
        config = read_group(group[GROUP_KEY])
        if hasattr(config.policy, "ladder"):
            key = json.dumps(config.policy.to_dict()) if config.shared else str(position)
            shared.setdefault(key, []).append(group)
    return [
        Pool(
            cast("AdaptivePolicy", read_group(part[0][GROUP_KEY]).policy),
            part,
            [members[entry.param] for entry in named(part) if entry.param in members],
        )
        for part in shared.values()
    ]


def _any_packed(choices: Mapping[str, Choice]) -> bool:
    return any(choice.format.packed for choice in choices.values())


class _Sizes:
    """Bytes of packed states on a grid."""

    def __init__(self, grid: Grid) -> None:
        self._per_bit = grid.rows * packed_bytes(grid.row, 1)
        self._scales = grid.rows * grid.blocks_per_row

    def of(self, format: Format) -> int:
        """Bytes of codes and scales in a format."""
        return format.bits * self._per_bit + self._scales * format.scale_dtype.itemsize
