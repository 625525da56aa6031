"""What all optimizers share: groups, lazy states, the one step loop, saving and loading.

A subclass declares its states and hands a list of parameters to one kernel call. This class knows
when states are made; formats come from the group's policy, and `checkpoint` knows files.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from stquant.checkpoint import restore
from stquant.checkpoint import state_dict as presentation
from stquant.checkpoint.restore import Named, named
from stquant.checkpoint.schema import GROUP_KEY, GroupConfig, read_group
from stquant.distributed import agreement, tensors
from stquant.errors import CheckpointError
from stquant.kernels.backend import resolve, warn_if_slow, why_not_compiled
from stquant.kernels.ops import Memo, Rule
from stquant.optim.adaptive import Controller
from stquant.optim.capturing import check_capturing, count_, step_count
from stquant.optim.compiled import traced_step
from stquant.optim.items import is_settled, items_of
from stquant.optim.masters import check_masters
from stquant.optim.options import check_fused, check_gradient
from stquant.optim.policy_driven import Choices, PolicyDriven, rounding_of
from stquant.policy.budget import is_adaptive
from stquant.policy.policies import Policy, parse
from stquant.report.memory import tensors_of
from stquant.storage.master import PackedResidual, check_master_bits
from stquant.storage.packed import PackedState

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class PackedOptimizer(PolicyDriven):
    """Base of the optimizers whose states are packed.

    Args:
        params: Tensors, groups (dicts), or `model.named_parameters()`; names then stand in
            reports and errors. A group may set `policy` and `master_bits` for itself.
        defaults: torch's hyperparameters.
        policy: Chooses the formats.
        master_bits: Bits of the residual of bf16 parameters.
        masters: Residuals to start from, by name, as `cast_model` returns them; None for zeros.
        backend: Name of the kernels to use; None takes the best of this machine.
        seed: Seed of stochastic rounding.
        process_group: Replicas of plain parameters, which then take the decisions of the first.
    """

    OPERATION: ClassVar[str]
    """Name of the kernel that takes a step."""

    _finish_backward: Callable[[], None] | None = None
    """Set by gradient release; `step` calls it before it uses the gradients that are left."""

    _memos: dict[torch.Tensor, Memo]
    """What the kernels know of each parameter from the last step."""

    _packs_files = False
    """Whether the `state_dict()` that is being made is a packed one."""

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        policy: Policy | str,
        master_bits: int | str | None,
        masters: dict[str, torch.Tensor] | None,
        backend: str | None,
        seed: int,
        process_group: Any = None,
    ) -> None:
        resolve(backend)
        warn_if_slow(backend)
        self._backend_name = backend
        if not isinstance(seed, int) or isinstance(seed, bool):
            raise ValueError(f"seed={seed!r} is not an integer; use for example seed=0")
        config = GroupConfig(parse(policy), check_master_bits(master_bits), seed)
        super().__init__(params, {**defaults, GROUP_KEY: config.dump()})
        entries = {entry.name: entry for entry in named(self.param_groups)}
        check_masters(masters or {}, {name: (e.param, rounding_of(e).residual_bits) for name, e in entries.items()})
        self._masters = dict(masters or {})
        self._controller = Controller()
        self._memos = defaultdict(Memo)
        self._replicas = agreement.Replicas(process_group)
        self._check_budgets(self.param_groups)
        self.register_state_dict_post_hook(_present)

    def _rule(self, group: dict[str, Any], seed: int) -> Rule:
        """Return the hyperparameters of a group's step."""
        raise NotImplementedError

    def _check_options(self, group: dict[str, Any]) -> None:
        """Raise `ValueError` if the hyperparameters of a group are not supported."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in torch; `policy` and `master_bits` may differ from the optimizer's.

        Raises:
            ValueError: A parameter or an option of the group is not supported; nothing was added.
        """
        if isinstance(param_group, dict) and param_group.keys() & {"policy", "master_bits"}:
            default = read_group(param_group.get(GROUP_KEY, self.defaults[GROUP_KEY]))
            policy = parse(param_group.get("policy", default.policy))
            master_bits = check_master_bits(param_group.get("master_bits", default.master_bits))
            shared = "policy" not in param_group
            plain = {key: value for key, value in param_group.items() if key not in ("policy", "master_bits")}
            param_group = {**plain, GROUP_KEY: GroupConfig(policy, master_bits, default.seed, shared).dump()}
        self._measuring = self._traced = None
        super().add_param_group(param_group)
        try:
            self._validate(self.param_groups)
            if "_controller" in self.__dict__:
                self._check_budgets(self.param_groups)
        except Exception:
            self.param_groups.pop()
            raise

    def _validate(self, groups: Sequence[dict[str, Any]]) -> None:
        for group in groups:
            self._check_options(group)
            self._policy(group).check(self.STATES)
        for entry in named(groups):
            tensors.check_supported(entry.name, entry.param)
            if entry.param.dtype not in _FLOATS:
                raise ValueError(
                    f"parameter {entry.name!r} has dtype {entry.param.dtype}; "
                    "allowed are float64, float32, bfloat16 and float16"
                )
            rounding, choices = rounding_of(entry), self._choose(entry)
            if entry.group.get("fused"):
                formats = [choice.format for choice in choices.values()]
                box = tensors.box_of(entry.param)
                check_fused(entry.name, why_not_compiled(self._backend_name, entry.param, formats, box))
            for state, choice in choices.items():
                if choice.format.packed:
                    tensors.grid_of(entry.name, entry.param, choice.format.block)
                if choice.format.prepay and not rounding.keeps_small_changes:
                    raise ValueError(
                        f"parameter {entry.name!r}: {choice.format.name} of {state} prepays small changes, which "
                        f"master_bits=None rounds away in {entry.param.dtype}; use master_bits=0 or more, "
                        "or a format without prepay"
                    )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient.

        Args:
            closure: Evaluates the model again and returns the loss; optional.

        Returns:
            What `closure` returned, or None.

        Raises:
            RuntimeError: A gradient is sparse; nothing was changed.
        """
        if torch.compiler.is_compiling():
            return traced_step(self, closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step()
        return loss

    def _step(self) -> None:
        """Take the step of a closure that has run."""
        self._traced = None
        check_capturing(self.param_groups)
        entries = list(named(self.param_groups))
        for entry in entries:
            check_gradient(entry)
        if self._finish_backward is not None:
            self._finish_backward()
        self.init_state()
        self._update([entry for entry in entries if entry.param.grad is not None])
        self._decide()

    def _update(self, entries: Sequence[Named]) -> None:
        """Update parameters, all of which have a state and a gradient: one kernel call per group."""
        kernels = resolve(self._backend_name)
        for _, members in itertools.groupby(entries, key=lambda entry: id(entry.group)):
            part = list(members)
            group = part[0].group
            config = read_group(group[GROUP_KEY])
            rule = self._rule(group, config.seed)
            work = [(entry.param, entry.param.grad, self.state[entry.param]) for entry in part]
            items = items_of(part, tuple(self._states(group)), work, self._memos)
            if group.get("capturable"):
                count_(self._backend_name, part, items, rule)
            elif is_adaptive(config.policy) and any(map(config.policy.due, {item.step for item in items})):
                self._measuring = self._measuring or self._pools()
                pool = next(pool for pool in self._measuring if any(group is g for g in pool.groups))
                self._controller.measure(kernels, pool, list(zip(part, items, strict=True)), rule)
            getattr(kernels, self.OPERATION)(items, rule)

    def _decide(self) -> None:
        """Let adaptive policies plan and carry out what this step has measured."""
        self._measuring = None
        if self._controller.measured:
            agree = functools.partial(agreement.sum_parts, process_group=self._replicas.group)
            self._controller.decide(self._pools(with_states=True), self.state, agree)

    @torch.no_grad()
    def init_state(self) -> None:
        """Create the state of every trainable parameter that has none; `step` does so, too.

        Raises:
            BudgetError: A policy's budget is too small for the states; none was created.
        """
        if all(is_settled(group, self._states(group).keys(), self.state) for group in self.param_groups):
            return
        fresh = []
        for entry in named(self.param_groups):
            state = self.state.get(entry.param)
            if not state:
                if entry.param.requires_grad or entry.param.grad is not None:
                    fresh.append(entry)
                continue
            if entry.group.get("capturable") and state["step"].device != entry.param.device:
                state["step"] = state["step"].to(entry.param.device)
            if any(isinstance(value, Mapping) or tensors.is_distributed(value) for value in state.values()):
                # Some wrappers write what state_dict() returned straight into `state`.
                self.state[entry.param] = state = self._absorb(entry, state, None)
            if not self._states(entry.group).keys() <= state.keys():
                # An option was switched on since, for example a momentum.
                state.update({**self._fresh_states(entry, self._start_choices(self.param_groups)), **state})
        if fresh:
            self._warn_if_flat()
            choices = self._start_choices(self.param_groups)
            for entry in fresh:
                self.state[entry.param] = self._fresh_state(entry, choices)
            self._fit()

    def _fresh_state(self, entry: Named, choices: Choices) -> dict[str, Any]:
        state: dict[str, Any] = {
            "step": step_count(entry),
            "noise_id": restore.next_noise_id(self.state.values()),
        }
        return self._with_residual(
            entry, {**state, **self._fresh_states(entry, choices)}, self._masters.pop(entry.name, None)
        )

    def _fresh_states(self, entry: Named, choices: Choices) -> dict[str, torch.Tensor | PackedState]:
        param = entry.param
        states: dict[str, torch.Tensor | PackedState] = {}
        for name, choice in self._choose(entry, choices).items():
            if choice.format.packed:
                grid = tensors.grid_of(entry.name, param, choice.format.block)
                states[name] = PackedState.zeros(choice.format, grid, param.device)
            else:
                states[name] = presentation.plain_state(param)
        return self._with_control(entry, states)

    def _with_residual(self, entry: Named, state: dict[str, Any], start: torch.Tensor | None) -> dict[str, Any]:
        """Add a residual if the parameter is to have one; its grid is that of the states."""
        bits = rounding_of(entry).residual_bits
        if bits and "residual" not in state:
            grids = [value.grid for value in state.values() if isinstance(value, PackedState)]
            grid = grids[0] if grids else tensors.grid_of(entry.name, entry.param, 128, scaled=False)
            if start is None:
                state["residual"] = PackedResidual.zeros(bits, grid, entry.param.device)
            else:
                part = tensors.unwrap(start, entry.param).to(entry.param.device)
                state["residual"] = PackedResidual.pack(bits, grid, part)
        return state

    def state_dict(self, *, packed: bool = False) -> dict[str, Any]:
        """Return a snapshot that `load_state_dict` continues from bit for bit.

        Args:
            packed: Keep codes and residuals packed: the smallest file for `torch.save`. Loaders
                that fill the tensors of a fresh optimizer (`torch.distributed.checkpoint`) need
                the default form, whose shapes do not depend on the bits.

        Raises:
            ValueError: `packed` was asked for, and a parameter is sharded.
        """
        for entry in named(self.param_groups):
            if packed and tensors.is_distributed(entry.param):
                raise ValueError(
                    f"parameter {entry.name!r} is a DTensor, and a packed file holds whole tensors only; "
                    "save state_dict() with torch.distributed.checkpoint"
                )
        self._packs_files = packed
        try:
            return super().state_dict()
        finally:
            self._packs_files = False

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict()` returned, packed or not, or the state dict of the torch optimizer of this name.

        Continuing after a load gives the same bits as not stopping. Formats, policy and seed of
        the file win over those of this optimizer, as its learning rate does; plain fp32 states of
        a torch file are encoded in this optimizer's formats, rounded to nearest.

        Args:
            state_dict: The state dict; not changed, and no memory is shared with it.

        Raises:
            CheckpointError: It does not fit; names the parameter. The optimizer is unchanged, and so
                are those of all ranks that share its parameters.
        """
        state_dict = state_dict.copy()
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = pre_hook(self, state_dict) or state_dict
        failure: Exception | None = None
        try:
            groups, state = self._read(state_dict)
        except Exception as error:
            failure = error
        if agreement.on_any_rank([entry.param for entry in named(self.param_groups)], failure is not None):
            raise failure or CheckpointError("another rank could not load its part and says why; nothing was loaded")
        self.__setstate__({"state": type(self.state)(dict, state), "param_groups": groups})
        for entry in named(groups):
            if entry.param in state:
                self._masters.pop(entry.name, None)
        self._controller = Controller()
        self._fit()
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    @torch.no_grad()
    def _read(self, state_dict: Mapping[str, Any]) -> tuple[list[dict[str, Any]], dict[torch.Tensor, Any]]:
        """Return groups and live states that a state dict makes of this optimizer, which stays as it is."""
        groups = restore.merge_groups(state_dict["param_groups"], self.param_groups)
        self._validate(groups)
        choices = self._start_choices(groups)
        return groups, restore.build_states(
            state_dict, groups, lambda entry, saved, plain: self._absorb(entry, saved, choices if plain else None)
        )

    def _absorb(self, entry: Named, saved: Mapping[str, Any], choices: Choices | None) -> dict[str, Any]:
        """Build a live state from a saved one; plain states are encoded if there are `choices`."""
        formats = None if choices is None else self._choose(entry, choices)
        state = presentation.absorb(entry.name, entry.param, saved, self._states(entry.group), formats)
        state = self._with_control(entry, state)
        return self._with_residual(entry, state, self._masters.get(entry.name))

    def export_state_dict(self) -> dict[str, Any]:
        """Return a state dict that torch's optimizer of this name loads, with decoded fp32 states.

        The residuals of bf16 parameters are not part of it.
        """
        return presentation.export_all(self.param_groups, self.state)

    def check_replicas(self, process_group: Any = None) -> None:
        """Compare weights and states with those of the ranks that hold replicas; for debugging.

        Every rank has to call it. Distributed parameters are compared over the mesh dimensions that
        replicate them.

        Args:
            process_group: Ranks that hold replicas of plain parameters, as under DDP; None does not
                compare those.

        Raises:
            AgreementError: Replicas differ; names the parameters.
        """
        entries = [entry for entry in named(self.param_groups) if entry.param in self.state]
        agreement.check_replicas(
            [(e.name, e.param, [tensors.local(e.param), *tensors_of(self.state[e.param])]) for e in entries],
            process_group,
        )

    def __getstate__(self) -> dict[str, Any]:
        return {
            **super().__getstate__(),
            "_backend_name": self._backend_name,
            "_masters": self._masters,
            "_controller": self._controller,
            "_replicas": self._replicas,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        is_new = "_optimizer_state_dict_post_hooks" not in self.__dict__
        self._memos = defaultdict(Memo)
        super().__setstate__(state)
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)
        if is_new:
            self.register_state_dict_post_hook(_present)


def _present(optimizer: torch.optim.Optimizer, result: dict[str, Any]) -> None:
    """Replace live states by what a file may hold; the first of the post hooks, so others see that."""
    packed = optimizer._packs_files if isinstance(optimizer, PackedOptimizer) else False
    params = [entry.param for entry in named(optimizer.param_groups)]
    result["state"] = {key: presentation.present(value, params[key], packed) for key, value in result["state"].items()}
