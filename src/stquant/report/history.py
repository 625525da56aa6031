"""What a run log tells, arranged for showing: formats over time, bytes, damage, losses, changes.

Data only; `figures` draws it, `page` and the command line show it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from stquant.codecs import catalog
from stquant.errors import FormatError
from stquant.policy.decision import Decision, StateDecision
from stquant.report import decisions
from stquant.report.runlog import Log


@dataclass(frozen=True, slots=True)
class Span:
    """A time in which a state kept its format.

    Attributes:
        start: First step.
        stop: Step of the change that ended it, or the last step of the run.
        format: Name of the format.
        width: Bits of a code.
        bits: True bits per element, scales and padding included.
    """

    start: int
    stop: int
    format: str
    width: int
    bits: float


@dataclass(frozen=True, slots=True)
class Track:
    """The formats of one state over the run.

    Attributes:
        parameter: The parameter's name.
        state: The state's name.
        elements: Elements of the state.
        spans: Its formats, in order and without a gap.
        last: What the last decision said of it.
        predicted: Damage that its last format is expected to make, relative to the squared step of all weights.
        measured: Damage measured at the last decision, likewise; None if it was not measured then.
    """

    parameter: str
    state: str
    elements: int
    spans: tuple[Span, ...]
    last: StateDecision
    predicted: float
    measured: float | None


@dataclass(frozen=True, slots=True)
class Change:
    """A state that got another format.

    Attributes:
        step: When.
        decision: What was decided, and why.
    """

    step: int
    decision: StateDecision


@dataclass(frozen=True, slots=True)
class Pool:
    """The decisions of one policy: lists of one length, an entry for each decision.

    Attributes:
        policy: The policy, as its `repr`, at the last decision.
        steps: When.
        bytes: Bytes that count, after the decision.
        budgets: Bytes allowed, or None.
        predicted: Damage expected in the new formats, relative to the squared step of the weights.
        measured: Damage measured in the old ones, likewise; None if not all states were measured.
    """

    policy: str
    steps: tuple[int, ...]
    bytes: tuple[int, ...]
    budgets: tuple[int | None, ...]
    predicted: tuple[float, ...]
    measured: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class Holding:
    """What all policies together hold from a step on, until the next one.

    Attributes:
        step: When.
        widths: Bytes of the adapting states by bits of their codes, few bits first.
        beside: Bytes that count besides: states that cannot be packed, step counts, residuals.
        budget: Bytes allowed; None if a policy has no limit of bytes.
    """

    step: int
    widths: dict[int, int]
    beside: int
    budget: int | None

    @property
    def bytes(self) -> int:
        """Bytes that count."""
        return self.beside + sum(self.widths.values())


@dataclass(frozen=True, slots=True)
class History:
    """A run, arranged for showing.

    Attributes:
        optimizer: Name of the optimizer's class.
        conditions: Versions and machine.
        end: Last step that the log speaks of.
        pools: One for each policy that decided.
        holdings: Bytes over time; the first is how the run started.
        tracks: One for each state, in the order of the parameters.
        changes: All changes of formats, in order of time.
        losses: Step and training loss.
    """

    optimizer: str
    conditions: dict[str, Any]
    end: int
    pools: tuple[Pool, ...]
    holdings: tuple[Holding, ...]
    tracks: tuple[Track, ...]
    changes: tuple[Change, ...]
    losses: tuple[tuple[int, float], ...]

    @classmethod
    def of(cls, log: Log) -> History:
        """Arrange a log."""
        end = max([step for step, _ in log.losses] + [decision.step for decision in log.decisions], default=0)
        return cls(
            optimizer=log.header["optimizer"],
            conditions=log.header["conditions"],
            end=end,
            pools=tuple(map(_pool, _by_pool(log.decisions))),
            holdings=tuple(_holdings(log.decisions)),
            tracks=tuple(_tracks(log, end)),
            changes=tuple(
                Change(decision.step, state)
                for decision in log.decisions
                for state in decision.states
                if state.old != state.new
            ),
            losses=log.losses,
        )

    @property
    def states(self) -> tuple[str, ...]:
        """Names of the states."""
        return tuple(dict.fromkeys(track.state for track in self.tracks))

    @property
    def bits(self) -> float:
        """Average true bits per element over all states that adapt, at the end."""
        elements = sum(track.elements for track in self.tracks)
        return sum(track.spans[-1].bits * track.elements for track in self.tracks) / elements if elements else 0.0

    @property
    def exceeded(self) -> tuple[int, ...]:
        """Steps of the decisions after which more bytes were held than allowed."""
        return tuple(
            step
            for pool in self.pools
            for step, held, budget in zip(pool.steps, pool.bytes, pool.budgets, strict=True)
            if budget is not None and held > budget
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers, strings, lists and dicts; None where a number is not finite."""
        return {
            "optimizer": self.optimizer,
            "conditions": self.conditions,
            "steps": self.end,
            "bits": self.bits,
            "exceeded": list(self.exceeded),
            "policies": [_dict(pool) for pool in self.pools],
            "bytes": [{**_dict(held), "bytes": held.bytes} for held in self.holdings],
            "states": [_track_dict(track) for track in self.tracks],
            "changes": [_change_dict(change) for change in self.changes],
            "losses": [{"step": step, "loss": _finite(loss)} for step, loss in self.losses],
        }


def _by_pool(taken: Sequence[Decision]) -> list[list[Decision]]:
    """Decisions of each policy; a parameter has one policy, so the first of them tells which."""
    pools: dict[str, list[Decision]] = {}
    for decision in taken:
        pools.setdefault(decision.states[0].parameter, []).append(decision)
    return list(pools.values())


def _pool(taken: Sequence[Decision]) -> Pool:
    return Pool(
        policy=taken[-1].policy,
        steps=tuple(decision.step for decision in taken),
        bytes=tuple(decision.bytes for decision in taken),
        budgets=tuple(decision.budget for decision in taken),
        predicted=tuple(map(decisions.predicted, taken)),
        measured=tuple(map(decisions.measured, taken)),
    )


def _holdings(taken: Sequence[Decision]) -> Iterator[Holding]:
    """The first decision of each policy also tells with what it started."""
    now = {pool[0].states[0].parameter: pool[0] for pool in _by_pool(taken)}
    started = set(now)
    if now:
        yield _holding(0, now, started)
    for step, part in groupby(taken, key=lambda decision: decision.step):
        for decision in part:
            now[decision.states[0].parameter] = decision
            started.discard(decision.states[0].parameter)
        yield _holding(step, now, started)


def _holding(step: int, now: dict[str, Decision], started: set[str]) -> Holding:
    widths: dict[int, int] = {}
    for name, decision in now.items():
        for state in decision.states:
            format, held = (state.old, state.old_bytes) if name in started else (state.new, state.new_bytes)
            width = _width(format, 8 * held / state.elements)
            widths[width] = widths.get(width, 0) + held
    budgets = [decision.budget for decision in now.values()]
    return Holding(
        step=step,
        widths=dict(sorted(widths.items())),
        beside=sum(decision.bytes - sum(state.new_bytes for state in decision.states) for decision in now.values()),
        budget=None if None in budgets else sum(filter(None, budgets)),
    )


def _tracks(log: Log, end: int) -> Iterator[Track]:
    said: dict[tuple[str, str], list[tuple[Decision, StateDecision]]] = {}
    for decision in log.decisions:
        for state in decision.states:
            said.setdefault((state.parameter, state.state), []).append((decision, state))
    places = {name: place for place, name in enumerate(log.header["parameters"])}
    for (parameter, name), parts in sorted(said.items(), key=lambda item: places.get(item[0][0], len(places))):
        decision, last = parts[-1]
        yield Track(
            parameter=parameter,
            state=name,
            elements=last.elements,
            spans=tuple(_spans([(decision.step, state) for decision, state in parts], end)),
            last=last,
            predicted=decisions.relative(last.predicted, decision),
            measured=decisions.relative(last.measured, decision) if last.factors else None,
        )


def _spans(parts: Sequence[tuple[int, StateDecision]], end: int) -> Iterator[Span]:
    """A span ends where the format changes; formats may also change between decisions, by a new policy."""
    first = parts[0][1]
    start, name, held = 0, first.old, first.old_bytes
    for step, state in parts:
        if state.new != name:
            yield _span(start, step, name, held, state.elements)
            start, name, held = step, state.new, state.new_bytes
    yield _span(start, max(end, start), name, held, first.elements)


def _span(start: int, stop: int, name: str, held: int, elements: int) -> Span:
    bits = 8 * held / elements
    return Span(start, stop, name, _width(name, bits), bits)


def _width(name: str, bits: float) -> int:
    """Bits of a code; from the true bits where this version does not know the format."""
    try:
        return catalog.get(name).bits
    except FormatError:
        return math.floor(bits)


def _track_dict(track: Track) -> dict[str, Any]:
    return {
        "parameter": track.parameter,
        "state": track.state,
        "elements": track.elements,
        "bits": track.spans[-1].bits,
        "predicted": _finite(track.predicted),
        "measured": _finite(track.measured),
        "why": track.last.why,
        "factors": {name: _finite(value) for name, value in track.last.factors.items()},
        "formats": [_dict(span) for span in track.spans],
    }


def _change_dict(change: Change) -> dict[str, Any]:
    state = change.decision
    names = ("parameter", "state", "old", "new", "old_bytes", "new_bytes", "why")
    return {"step": change.step, **{name: getattr(state, name) for name in names}}


def _dict(record: Any) -> dict[str, Any]:
    """Fields of a record, tuples as lists."""
    fields = {name: getattr(record, name) for name in record.__dataclass_fields__}
    return {
        name: [_finite(part) for part in value] if isinstance(value, tuple) else _finite(value)
        for name, value in fields.items()
    }


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
