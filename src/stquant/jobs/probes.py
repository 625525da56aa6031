"""Probes: what one state at one width does to the loss of examples that were not trained on.

A run is trained with 8-bit states up to a fork. From there it continues for a few steps as it is,
and once more for each state and format, with that one state recoded: the same batches, the same
random numbers, the same constant learning rate. A recoded momentum is prepaid where its format
asks for it, as in a step. The damage is the root mean square, over held-out examples, of what that
changes in the loss of an example: first-order, so it is there before any harm to the mean is, and
squared ones of several states add up.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from stquant import AdamW
from stquant.checkpoint.schema import GROUP_KEY, read_group
from stquant.codecs import catalog
from stquant.codecs.format import Format
from stquant.jobs.contenders import contender
from stquant.jobs.training import Run, backward
from stquant.jobs.workloads import WORKLOADS, Batch, Workload
from stquant.kernels.corrections import AdamConstants
from stquant.kernels.ops import AdamRule, Item
from stquant.kernels.reference import measure
from stquant.kernels.reference.measurement import energies, names
from stquant.policy.factors import Averages, Measured, factors
from stquant.storage.packed import PackedState

CANDIDATES: dict[str, tuple[Format, ...]] = {
    "exp_avg": tuple(catalog.default_for(bits, signed=True) for bits in (2, 3, 4, 5, 6, 8)),
    "exp_avg_sq": tuple(catalog.default_for(bits, signed=False) for bits in (0, 1, 2, 3, 4, 5, 6, 8)),
}
"""Formats that are measured; the last one is that of a run before the fork."""

PROBED = {"exp_avg": ("dynamic2", "dynamic3", "mulaw4"), "exp_avg_sq": ("log0", "log1", "log3")}
"""Formats that are tried."""

BEFORE = "8"


@dataclass(frozen=True, slots=True)
class Settings:
    """What is probed.

    Attributes:
        models: Names of workloads.
        seed: Of weights, data and rounding.
        forks: Where to fork, as shares of a full run.
        length: Steps from the fork to the measurement.
        examples: Held-out examples, about.
        tensors: Tensors of each model at most, evenly spread over it.
    """

    models: tuple[str, ...] = tuple(WORKLOADS)
    seed: int = 0
    forks: tuple[float, ...] = (0.1, 0.4)
    length: int = 8
    examples: int = 250
    tensors: int = 14

    def to_dict(self) -> dict[str, Any]:
        """Return the settings and the formats as plain numbers, strings, lists and dicts."""
        formats = {state: list(probed) for state, probed in PROBED.items()}
        plain = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}
        return {**plain, "formats": formats, "before": BEFORE}


@dataclass(frozen=True, slots=True)
class Probe:
    """One state at one format after one fork.

    Attributes:
        model: Name of the workload.
        fork: Step of the fork.
        tensor: Name of the parameter.
        state: Name of the state.
        format: Its format after the fork.
        damage: Root mean square change of an example's loss, in nats.
        change: Change of the mean loss, in nats.
        step_error: Sum of squared errors of the weight's step in the fork's step, at that format.
        factors: What the state's factors were in that step, at that format.
    """

    model: str
    fork: int
    tensor: str
    state: str
    format: str
    damage: float
    change: float
    step_error: float
    factors: dict[str, float]

    @property
    def key(self) -> tuple[str, int, str, str, str]:
        """What tells it from all other probes."""
        return self.model, self.fork, self.tensor, self.state, self.format


def probes(settings: Settings, model: str, known: Sequence[Probe] = ()) -> Iterator[tuple[Probe, int]]:
    """Probe one model; yields each probe and how many there are in all.

    Args:
        settings: What is probed.
        model: Name of the workload.
        known: Probes that need not be made again; they are yielded as they are.
    """
    found = {probe.key: probe for probe in known}
    workload = WORKLOADS[model]
    run = Run(workload, contender(BEFORE, settings.seed), settings.seed)
    training = run.train()
    for share in settings.forks:
        while run.done < max(1, round(share * run.steps)):
            next(training)
        fork = _Fork.of(run, settings)
        cells = [(name, state, format) for name in fork.tensors for state in PROBED for format in PROBED[state]]
        total = len(cells) * len(settings.forks)
        for name, state, format in cells:
            key = (model, fork.step, name, state, format)
            yield found[key] if key in found else fork.probe(name, state, format), total


@dataclass(slots=True)
class _Fork:
    """A run at the step where probes begin."""

    workload: Workload
    model: nn.Module
    optimizer: AdamW
    step: int
    tensors: list[str]
    batches: list[Batch]
    held_out: list[Batch]
    measured: dict[tuple[str, str, str], tuple[float, dict[str, float]]]
    losses: Tensor

    @classmethod
    def of(cls, run: Run, settings: Settings) -> _Fork:
        assert isinstance(run.optimizer, AdamW)
        model, optimizer = copy.deepcopy((run.model, run.optimizer))
        packed = [name for name, parameter in model.named_parameters() if _is_packed(optimizer.state[parameter])]
        fork = cls(
            run.workload,
            model,
            optimizer,
            run.done,
            _spread(packed, settings.tensors),
            [run.workload.batch(run.seed, run.done + step) for step in range(settings.length)],
            _first(run.workload.validation(), settings.examples),
            {},
            torch.empty(0),
        )
        fork.measured = fork._measured(packed)
        fork.losses = fork._continued(model=copy.deepcopy((model, optimizer)))
        return fork

    def probe(self, name: str, state: str, format: str) -> Probe:
        """Continue with one state recoded."""
        model, optimizer = copy.deepcopy((self.model, self.optimizer))
        parameter = dict(model.named_parameters())[name]
        _recode_(optimizer, parameter, state, catalog.get(format))
        change = (self._continued((model, optimizer)) - self.losses).double()
        return Probe(
            self.workload.name,
            self.step,
            name,
            state,
            format,
            damage=float(change.square().mean().sqrt()),
            change=float(change.mean()),
            step_error=self.measured[name, state, format][0],
            factors=self.measured[name, state, format][1],
        )

    def _continued(self, model: tuple[nn.Module, AdamW]) -> Tensor:
        """Take the steps after the fork and return the loss of each held-out example."""
        trained, optimizer = model
        trained.train()
        for batch in self.batches:
            optimizer.zero_grad()
            backward(trained, batch)
            optimizer.step()
        trained.eval()
        with torch.no_grad():
            return torch.cat([self.workload.losses(trained(**batch), batch) for batch in self.held_out])

    def _measured(self, packed: Sequence[str]) -> dict[tuple[str, str, str], tuple[float, dict[str, float]]]:
        """Step error and factors by tensor, state and probed format, in the step that comes next."""
        model, optimizer = copy.deepcopy((self.model, self.optimizer))
        optimizer.zero_grad()
        backward(model.train(), self.batches[0])
        parameters = dict(model.named_parameters())
        items = [_item(parameters[name], optimizer.state[parameters[name]]) for name in packed]
        found = energies(measure(items, _rule(optimizer), CANDIDATES)).tolist()
        columns = names(CANDIDATES)
        formats = {state: [format.name for format in candidates] for state, candidates in CANDIDATES.items()}
        states = [
            Measured(
                state,
                formats[state],
                len(formats[state]) - 1,
                dict(zip(columns, row, strict=True)),
                item.param.numel(),
                next(iter(item.states.values())).grid.row,  # type: ignore[union-attr]
                position / max(1, len(packed) - 1),
            )
            for position, (item, row) in enumerate(zip(items, found, strict=True))
            for state in CANDIDATES
        ]
        averages = Averages().updated(states)
        owners = [name for name in packed for _ in CANDIDATES]
        measured = {}
        for position in range(max(map(len, PROBED.values()))):
            tried = [_at(state, position) for state in states]
            for name, state, values in zip(owners, tried, factors(tried, averages), strict=True):
                measured[name, state.state, state.formats[state.present]] = state.damage()[state.present], values
        return measured


def _at(state: Measured, position: int) -> Measured:
    """The state as if it had the probed format at a position, or the last one."""
    probed = PROBED[state.state]
    return replace(state, present=list(state.formats).index(probed[min(position, len(probed) - 1)]))


def _recode_(optimizer: AdamW, parameter: Tensor, state: str, format: Format) -> None:
    """Recode a state between two steps; if its format prepays, the weight gets what the rounding drops."""
    states = optimizer.state[parameter]
    before = states[state]
    states[state] = after = before.recode(format.with_block(before.grid.block))
    if format.prepay:
        constants = AdamConstants.of(_rule(optimizer), int(states["step"]))
        move = constants.error * (before.decode() - after.decode())
        parameter.data -= move / (states["exp_avg_sq"].decode().sqrt() + constants.eps)


def _rule(optimizer: AdamW) -> AdamRule:
    group = optimizer.param_groups[0]
    return optimizer._rule(group, read_group(group[GROUP_KEY]).seed)


def _item(parameter: Tensor, state: dict[str, Any]) -> Item:
    assert parameter.grad is not None
    return Item(
        param=parameter.detach(),
        grad=parameter.grad,
        states={name: state[name] for name in CANDIDATES},
        residual=None,
        stochastic=False,
        step=int(state["step"]) + 1,
        noise_id=state["noise_id"],
    )


def _is_packed(state: dict[str, Any]) -> bool:
    return all(isinstance(state.get(name), PackedState) for name in CANDIDATES)


def _spread(items: list[str], count: int) -> list[str]:
    """Return `count` of the items, evenly spread from the first on; all if there are no more."""
    if count >= len(items):
        return items
    return [items[position * len(items) // count] for position in range(count)]


def _first(batches: list[Batch], examples: int) -> list[Batch]:
    """Return the first batches with about so many examples."""
    kept: list[Batch] = []
    for batch in batches:
        if sum(len(one["pixel_values" if "pixel_values" in one else "input_ids"]) for one in kept) < examples:
            kept.append(batch)
    return kept
