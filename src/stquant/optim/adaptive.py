"""Carries out what adaptive policies plan: measures, asks for a plan, recodes states.

The optimizer calls `start` and `fit` when states are made, `measure` before parameters step, and
`decide` at the end of a step. The numbers of a state's past stand in one small tensor for each
parameter, `state["control"]`; everything else follows from the states themselves, so that a loaded
optimizer goes on as if it had never stopped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stquant.checkpoint.restore import Named
from stquant.codecs import catalog
from stquant.codecs.format import Format
from stquant.distributed.agreement import Part
from stquant.errors import BudgetError
from stquant.kernels.backend import Operations
from stquant.kernels.ops import Item, Rule
from stquant.kernels.reference.measurement import BINS, energies, names
from stquant.optim.pools import AGE, MOVED, Member, Pool, Seat
from stquant.policy import transition
from stquant.policy.allocator import Table
from stquant.policy.budget import PRIOR, RUNGS, WIDTHS, rung
from stquant.policy.decision import Decision, StateDecision
from stquant.policy.factors import Measured, factors
from stquant.policy.facts import Choice
from stquant.storage.packed import PackedState

FADE = 0.5
"""Share of a remembered damage that is left at the next decision; a larger new one replaces it."""

_LARGEST = torch.finfo(torch.float32).max

Live = Mapping[Tensor, dict[str, Any]]
"""The states of an optimizer by parameter."""

Agree = Callable[[Sequence[Part]], Sequence[Tensor | None]]
"""Sums the bins that the holders of parts of parameters measured; None for what nobody measured."""


def start(pool: Pool) -> dict[Tensor, dict[str, Choice]]:
    """Choose formats for every parameter of a pool as if none had been measured yet.

    All states of a kind get the same width, the largest for which the limit is kept.

    Raises:
        BudgetError: The limit is below the least that is possible; names that.
    """
    widths = _start_widths(pool)
    chosen = {(seat.entry.param, seat.name): seat.ladder[rung(widths, seat.ladder, seat.signed)] for seat in pool.seats}
    return {
        param: {
            name: Choice(chosen[param, name]) if choice.format.packed else choice for name, choice in choices.items()
        }
        for param, choices in pool.plain.items()
    }


def _start_widths(pool: Pool) -> tuple[int, int]:
    policy, limit = pool.policy, pool.limit
    if limit is None:
        allowed = policy.tolerance or 0.0
        return next((w for w in RUNGS if PRIOR[True][w[0]] + PRIOR[False][w[1]] <= allowed), RUNGS[-1])
    fitting = [
        widths for widths in RUNGS if sum(s.sizes[rung(widths, s.ladder, s.signed)] for s in pool.seats) <= limit
    ]
    if not fitting:
        beside = policy.counted(pool.holdings)
        raise BudgetError(
            f"{policy!r} allows {limit + beside:,} bytes; these parameters take at least {pool.least + beside:,}: "
            f"use {policy.least(pool.holdings, pool.least)} or more"
        )
    return fitting[-1]


def fit(pool: Pool, live: Live) -> None:
    """Shrink states until a pool is within its limit; does nothing if it is."""
    current = [seat.column(live) for seat in pool.seats]
    held = sum(seat.sizes[column] for seat, column in zip(pool.seats, current, strict=True))
    if pool.limit is None or held <= pool.limit:
        return
    nobody = torch.zeros(len(current), dtype=torch.bool)
    plan = transition.plan(_table(pool, live), torch.tensor(current), nobody, pool.limit, 0.0)
    _carry_out(pool.seats, plan.choice.tolist(), live)


@dataclass(frozen=True, slots=True)
class _Sample:
    """What one parameter measured in this step."""

    candidates: Mapping[str, tuple[Format, ...]]
    bins: Tensor
    step: int
    lr: float

    @classmethod
    def empty(cls, pool: Pool, member: Member, live: Live) -> _Sample:
        """Stand for a parameter that was not measured on this rank."""
        candidates, state = pool.candidates(member), live[member.entry.param]
        bins = torch.zeros(len(names(candidates)), BINS, dtype=torch.int64)
        return cls(candidates, bins, int(state["step"]), float(member.entry.group["lr"]))


class Controller:
    """Measures and decides for the adaptive groups of one optimizer."""

    def __init__(self) -> None:
        self.decisions: dict[int, Decision] = {}
        """The last decision of each pool, by its number."""
        self._samples: dict[Tensor, _Sample] = {}

    @property
    def measured(self) -> bool:
        """Whether something was measured since the last decision."""
        return bool(self._samples)

    def measure(self, kernels: Operations, pool: Pool, items: Sequence[tuple[Named, Item]], rule: Rule) -> None:
        """Measure those parameters whose turn it is, before they step; a learning rate of 0 tells nothing."""
        if rule.lr == 0.0:
            return
        members = {member.entry.param: member for member in pool.members}
        alike: dict[tuple[tuple[str, tuple[Format, ...]], ...], list[tuple[Named, Item]]] = {}
        for entry, item in items:
            if _are_packed(list(item.states.values())) and pool.policy.due(item.step):
                candidates = pool.candidates(members[entry.param])
                alike.setdefault(tuple(candidates.items()), []).append((entry, item))
        for candidates_of, part in alike.items():
            found = kernels.measure([item for _, item in part], rule, dict(candidates_of))
            for (entry, item), bins in zip(part, found, strict=True):
                self._samples[entry.param] = _Sample(dict(candidates_of), bins, item.step, rule.lr)

    def decide(self, pools: Sequence[Pool], live: Live, agree: Agree) -> None:
        """Plan for the pools of which something was measured in this step, and carry it out."""
        measured_here, self._samples = self._samples, {}
        # All packed parameters, in the order that ranks share, whatever was measured on this one.
        members = {
            member.entry.param: (pool, member)
            for pool in pools
            for member in pool.members
            if _are_packed([live[member.entry.param][name] for name in member.states])
        }
        samples = {
            param: measured_here.get(param) or _Sample.empty(pool, member, live)
            for param, (pool, member) in members.items()
        }
        sums = agree(
            [
                Part(member.entry.name, param, samples[param].bins, param in measured_here)
                for param, (_, member) in members.items()
            ]
        )
        known = {param: bins for param, bins in zip(members, sums, strict=True) if bins is not None}
        samples = {param: samples[param] for param in known}
        totals = dict(zip(known, _energies(list(known.values())), strict=True))
        for number, pool in enumerate(pools):
            measured = _measured(pool.seats, live, samples, totals)
            if measured:
                steps = [samples[pool.seats[place].entry.param].step for place in measured]
                self.decisions[number] = _decide(pool, live, measured, max(steps))


def _are_packed(states: Sequence[Any]) -> bool:
    return bool(states) and all(isinstance(state, PackedState) for state in states)


def _energies(bins: Sequence[Tensor]) -> list[Tensor]:
    """The energies of every parameter, all at once; they differ in how many there are."""
    if not bins:
        return []
    flat = energies(torch.cat([part.flatten(0, -2) for part in bins]))
    return list(torch.split(flat, [len(part) for part in bins]))


def _measured(
    seats: Sequence[Seat], live: Live, samples: Mapping[Tensor, _Sample], totals: Mapping[Tensor, Tensor]
) -> dict[int, Measured]:
    """What was measured in this step, by the seat's place."""
    found = {}
    for place, seat in enumerate(seats):
        sample = samples.get(seat.entry.param)
        if sample is not None:
            bits = seat.state(live).format.bits
            ladder = sample.candidates[seat.name]
            found[place] = Measured(
                state=seat.name,
                formats=[format.name for format in ladder],
                present=max((n for n, format in enumerate(ladder) if format.bits <= bits), default=0),
                energies=dict(zip(names(sample.candidates), totals[seat.entry.param].tolist(), strict=True)),
                elements=seat.grid.elements,
                row=seat.grid.row,
                depth=place / max(1, len(seats) - 1),
                lr=sample.lr,
            )
    return found


def _decide(pool: Pool, live: Live, measured: Mapping[int, Measured], step: int) -> Decision:
    averages = pool.averages.updated(list(measured.values()))
    pool.remember(averages)
    shown = dict(zip(measured, factors(list(measured.values()), averages), strict=True))
    for place, seat in enumerate(pool.seats):
        _remember_(seat.control(live), measured.get(place))

    controls = torch.stack([seat.control(live) for seat in pool.seats])
    weights = _weights(pool.seats)
    moved = math.fsum(
        weight * float(control[MOVED])
        for seat, control, weight in zip(pool.seats, controls, weights, strict=True)
        if seat.row == 0
    )
    table = _table(pool, live)
    current = torch.tensor([seat.column(live) for seat in pool.seats])
    resting = controls[:, AGE] <= transition.REST
    plan = transition.plan(table, current, resting, pool.limit, moved * (pool.policy.tolerance or 0.0))
    old = [seat.state(live).format.name for seat in pool.seats]
    choice = plan.choice.tolist()
    _carry_out(pool.seats, choice, live)

    states = tuple(
        StateDecision(
            parameter=seat.entry.name,
            state=seat.name,
            elements=seat.grid.elements,
            old=old[place],
            new=seat.ladder[new].name,
            old_bytes=seat.sizes[before],
            new_bytes=seat.sizes[new],
            predicted=float(table.damage[place, new]),
            measured=weights[place] * _present_damage(pool, measured.get(place)),
            factors=shown.get(place, {}),
            why=_why(table, place, before, new, bool(resting[place]), plan.price),
        )
        for place, (seat, before, new) in enumerate(
            zip(pool.seats, current.tolist(), plan.choice.tolist(), strict=True)
        )
    )
    beside = pool.policy.counted(pool.holdings)
    return Decision(
        step=step,
        policy=repr(pool.policy),
        budget=None if pool.limit is None else pool.limit + beside,
        bytes=beside + sum(state.new_bytes for state in states),
        moved=moved,
        states=states,
    )


def _remember_(control: Tensor, measured: Measured | None) -> None:
    """Take damages where they are larger than what is left of the remembered ones; count the decision."""
    old = control.tolist()
    kept, age = old, old[AGE]
    if measured is not None:
        new = [0.0] * len(old)
        for name, damage in zip(measured.formats, measured.damage(), strict=True):
            new[WIDTHS.index(catalog.get(name).bits)] = damage
        new[MOVED] = measured.moved()
        kept = [max(min(value, _LARGEST), FADE * before) for value, before in zip(new, old, strict=True)]
        age = float(transition.REST) if age < 0 else age
    kept[AGE] = age + 1 if age >= 0 else age
    control.copy_(torch.tensor(kept, dtype=torch.float32))


def _table(pool: Pool, live: Live) -> Table:
    """Bytes and remembered damages of every state; a prior where nothing was measured."""
    controls = [seat.control(live).tolist() for seat in pool.seats]
    known = [(c[MOVED], seat.grid.elements) for seat, c in zip(pool.seats, controls, strict=True) if c[AGE] >= 0]
    elements = sum(count for _, count in known)
    typical = math.fsum(moved for moved, _ in known) / elements if elements else 1.0
    rows = []
    for seat, control, weight in zip(pool.seats, controls, _weights(pool.seats), strict=True):
        if control[AGE] >= 0:
            damages = [control[WIDTHS.index(format.bits)] for format in seat.ladder]
        else:
            damages = [PRIOR[seat.signed][format.bits] * typical * seat.grid.elements for format in seat.ladder]
        shares = [_share(pool, format) for format in seat.ladder]
        rows.append([weight * share * damage for share, damage in zip(shares, damages, strict=True)])
    return Table.of([seat.sizes for seat in pool.seats], rows)


def _share(pool: Pool, format: Format) -> float:
    return pool.policy.prepaid if format.prepay else 1.0


def _weights(seats: Sequence[Seat]) -> list[float]:
    """Squared learning rates relative to the largest: what an error in the update does to the weight."""
    rates = [float(seat.entry.group["lr"]) for seat in seats]
    largest = max(rates, default=0.0) or 1.0
    return [(rate / largest) ** 2 for rate in rates]


def _carry_out(seats: Sequence[Seat], choice: Sequence[int], live: Live) -> None:
    """Recode the states that change, those that shrink first, so that the limit holds throughout."""
    changes = [
        (seat.sizes[column] - seat.sizes[seat.column(live)], seat, column)
        for seat, column in zip(seats, choice, strict=True)
        if column != seat.column(live)
    ]
    for _, seat, column in sorted(changes, key=lambda change: change[0] > 0):
        live[seat.entry.param][seat.name] = seat.state(live).recode(seat.ladder[column])
        seat.control(live)[AGE] = 0.0


def _present_damage(pool: Pool, measured: Measured | None) -> float:
    if measured is None:
        return 0.0
    return _share(pool, catalog.get(measured.formats[measured.present])) * measured.damage()[measured.present]


def _why(table: Table, place: int, before: int, new: int, resting: bool, price: float) -> str:
    cost, damage = table.bytes[place].tolist(), table.damage[place].tolist()
    if before == new:
        return "resting after a change" if resting else "kept"
    gain = (damage[before] - damage[new]) / max(1, abs(cost[new] - cost[before]))
    if new > before:
        return f"raised: saves {gain:.3g} of damage per byte, others {price:.3g}"
    return f"lowered: costs {-gain:.3g} of damage per byte, others gain {price:.3g}"
