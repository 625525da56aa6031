"""Which formats the states of an optimizer have: its policies, their budgets, and what they cost.

The part of an optimizer that answers to policies; stepping, saving and loading are in `base`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from stquant.checkpoint.restore import Named, named
from stquant.checkpoint.schema import CONTROL, GROUP_KEY, GroupConfig, read_group
from stquant.optim.adaptive import Controller, fit, start
from stquant.optim.pools import Member, Pool, fresh_control, pools
from stquant.optim.refit import refit
from stquant.policy.budget import is_adaptive
from stquant.policy.facts import Choice, ParameterFacts
from stquant.policy.policies import Policy, parse
from stquant.report.decisions import Decisions
from stquant.report.ledger import Ledger, Row, rows_of
from stquant.storage.master import WeightRounding
from stquant.storage.packed import PackedState

if TYPE_CHECKING:
    from stquant.optim.compiled import TracedStep

_FLAT = 1 << 20
"""Elements of a vector that is taken for many parameters in one; those of models have fewer."""

Choices = Mapping[torch.Tensor, Mapping[str, Choice]]
"""Formats of the states of parameters."""


class PolicyDriven(torch.optim.Optimizer):
    """An optimizer whose groups have policies."""

    _controller: Controller

    _measuring: list[Pool] | None = None
    """The pools of a step in which something is measured; gradient release updates one by one."""

    _traced: TracedStep | None = None
    """What a compiler may trace the next step with; None if that is to run outside of graphs."""

    STATES: ClassVar[Mapping[str, bool]]
    """Names of the states, and whether they hold negative values."""

    PLAIN_BITS: ClassVar[int] = 4
    """Fewest bits that adaptive policies give a signed state which cannot prepay."""

    def ledger(self) -> Ledger:
        """Return what every state of every parameter costs now, in bytes and bits."""
        return Ledger(list(self._rows()))

    def decisions(self) -> Decisions:
        """Return the last decision of each adaptive policy: what was measured, changed, and why; `str()` is a table.

        Empty before the first decision, after a load, and for policies that are not adaptive.
        """
        return Decisions(decision for _, decision in sorted(self._controller.decisions.items()))

    @torch.no_grad()
    def set_policy(self, policy: Policy | str, group: int | None = None) -> None:
        """Change the policy; states get its formats at once, those in fp32 included.

        Args:
            policy: A policy or its name, as for the constructor.
            group: Index of the parameter group that gets it for itself; None for all groups, which
                share a budget.

        Raises:
            ValueError: The policy does not fit, or its budget is too small; nothing was changed.
        """
        wanted = parse(policy)
        chosen = self.param_groups if group is None else [self.param_groups[group]]
        groups = [dict(g) for g in self.param_groups]
        for old, new in zip(self.param_groups, groups, strict=True):
            if any(old is g for g in chosen):
                config = read_group(old[GROUP_KEY])
                new[GROUP_KEY] = GroupConfig(wanted, config.master_bits, config.seed, group is None).dump()
        self._validate(groups)
        choices = self._start_choices(groups)
        for old, new in zip(self.param_groups, groups, strict=True):
            old[GROUP_KEY] = new[GROUP_KEY]
        for entry in named(chosen):
            if self.state.get(entry.param):
                state = self.state[entry.param]
                state.pop(CONTROL, None)
                refit(entry.name, entry.param, state, self._choose(entry, choices), keep=is_adaptive(wanted))
                self._with_control(entry, state)
        self._controller = Controller()
        self._fit()

    def __repr__(self) -> str:
        text = super().__repr__()
        for dumped in {group[GROUP_KEY] for group in self.param_groups}:
            text = text.replace(f"{GROUP_KEY}: {dumped}\n", f"{GROUP_KEY}: {read_group(dumped)}\n")
        return text

    def _rows(self) -> Iterator[Row]:
        for entry in named(self.param_groups):
            if entry.param in self.state:
                reasons = {name: choice.reason for name, choice in self._choose(entry).items()}
                yield from rows_of(entry.name, entry.param, self.state[entry.param], reasons)

    def _validate(self, groups: Sequence[dict[str, Any]]) -> None:
        """Raise if an option or a parameter of groups is not supported."""
        raise NotImplementedError

    def _prepays(self, group: dict[str, Any]) -> bool:
        """Whether the step can take at once what a format rounds away from a momentum."""
        return True

    def _states(self, group: dict[str, Any]) -> Mapping[str, bool]:
        """Names of the states of a group's parameters, and whether they are signed."""
        return self.STATES

    def _policy(self, group: dict[str, Any]) -> Policy:
        return read_group(group[GROUP_KEY]).policy

    def _choose(self, entry: Named, choices: Choices | None = None) -> dict[str, Choice]:
        """Choose formats for a parameter: those of `choices`, else what its policy says of it alone."""
        if choices and entry.param in choices:
            return dict(choices[entry.param])
        return self._policy(entry.group).choose(self._facts(entry), self._states(entry.group))

    def _warn_if_flat(self) -> None:
        """Warn if nothing is packed because a wrapper has made one vector out of many parameters."""
        entries = list(named(self.param_groups))
        if any(entry.param.dim() != 1 for entry in entries):
            return
        for entry in entries:
            wanted = self._policy(entry.group).formats_of(self._states(entry.group)).values()
            reasons = {choice.reason for choice in self._choose(entry).values() if not choice.format.packed}
            if entry.param.numel() >= _FLAT and "1-D" in reasons and any(format.packed for format in wanted):
                warnings.warn(
                    f"no state is packed, as all parameters are 1-D, for example {entry.name!r} with "
                    f"{entry.param.numel():,} elements; flat partitions (DeepSpeed ZeRO) need a policy with flat=True, "
                    "for example stquant.Budget(bits=3, flat=True)",
                    stacklevel=4,
                )
                return

    def _facts(self, entry: Named) -> ParameterFacts:
        prepays = self._prepays(entry.group) and rounding_of(entry).keeps_small_changes
        return ParameterFacts(tuple(entry.param.shape), entry.param.dtype, prepays, self.PLAIN_BITS)

    def _pools(self, groups: Sequence[dict[str, Any]] | None = None, with_states: bool = False) -> list[Pool]:
        """Return who shares a budget: the parameters that have states, or are to have them, too."""
        groups = self.param_groups if groups is None else groups
        members = {}
        for entry in named(groups):
            expected = not with_states and (entry.param.requires_grad or entry.param.grad is not None)
            if is_adaptive(self._policy(entry.group)) and (expected or self.state.get(entry.param)):
                bits = rounding_of(entry).residual_bits
                members[entry.param] = Member(entry, self._facts(entry), self._states(entry.group), bits)
        return pools(groups, members)

    def _start_choices(self, groups: Sequence[dict[str, Any]]) -> Choices:
        """Choose formats for all parameters of adaptive policies, as if nothing was known."""
        return {param: choices for pool in self._pools(groups) for param, choices in start(pool).items()}

    def _check_budgets(self, groups: Sequence[dict[str, Any]]) -> None:
        """Raise `BudgetError` if the limit of an adaptive policy cannot be kept."""
        self._start_choices(groups)

    def _fit(self) -> None:
        """Shrink states that are there, and may have been replaced, until every budget holds."""
        self._measuring = self._traced = None
        for pool in self._pools(with_states=True):
            fit(pool, self.state)

    def _with_control(self, entry: Named, state: dict[str, Any]) -> dict[str, Any]:
        """Add what an adaptive policy remembers, if the parameter's states are packed."""
        packed = any(isinstance(value, PackedState) for value in state.values())
        if packed and is_adaptive(self._policy(entry.group)) and CONTROL not in state:
            state[CONTROL] = fresh_control(self._states(entry.group))
        return state


def rounding_of(entry: Named) -> WeightRounding:
    """Return how the weights of a parameter are rounded."""
    return WeightRounding.of(entry.name, entry.param.dtype, read_group(entry.group[GROUP_KEY]).master_bits)
