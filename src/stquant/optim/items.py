"""Parameters of an optimizer as the kernels see them: their shares of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from stquant.checkpoint.restore import Named
from stquant.distributed import tensors
from stquant.kernels.ops import Item, Memo
from stquant.optim.policy_driven import rounding_of
from stquant.storage.master import PackedResidual
from stquant.storage.packed import PackedState

Work = tuple[Tensor, Tensor | None, Mapping[str, Any]]
"""What is updated (a parameter, or what a compiler works on in its place), its gradient and its state."""


_LIVE = frozenset({Tensor, PackedState, PackedResidual, int})
"""Types of what a live state holds; states with others are looked at closer."""


def is_settled(group: Mapping[str, Any], names: Set[str], states: Mapping[Tensor, Mapping[str, Any]]) -> bool:
    """Whether all parameters of a group have the states that they are to have, and live ones; seen at a glance."""
    return not group.get("capturable") and all(
        param in states and names <= states[param].keys() and _LIVE.issuperset(map(type, states[param].values()))
        for param in group["params"]
    )


def items_of(
    entries: Sequence[Named], names: Sequence[str], work: Sequence[Work], memos: Mapping[Tensor, Memo] | None
) -> list[Item]:
    """Return what the kernels need for a step of parameters of one group, and count it unless a graph may capture it.

    Args:
        entries: The parameters.
        names: Names of the states that the step uses.
        work: What is updated for each.
        memos: What kernels remember of each; None if the tensors are others at each step.
    """
    capturable = bool(entries[0].group.get("capturable"))
    if not capturable:
        _count_([state["step"] for _, _, state in work])
    kinds = {entry.param.dtype: entry for entry in entries}
    stochastic = {dtype: rounding_of(entry).stochastic for dtype, entry in kinds.items()}
    items = []
    for param, grad, state in work:
        assert grad is not None
        item = Item(
            param=tensors.local(param) if tensors.is_distributed(param) else param,
            grad=tensors.local_grad(param, grad),
            states={name: state[name] for name in names},
            residual=state.get("residual"),
            stochastic=stochastic[param.dtype],
            step=0 if capturable else int(state["step"]),
            noise_id=state["noise_id"],
            box=tensors.box_of(param),
            memo=None if memos is None else memos[param],
            counter=state["step"] if capturable else None,
        )
        items.append(item)
    return items


def _count_(steps: list[Tensor]) -> None:
    if all(step.is_cpu for step in steps):
        # As torch's optimizers do: the same without alpha, or with a number, takes several times as long.
        torch._foreach_add_(steps, torch.ones(()), alpha=1.0)
    else:  # those of a capturable step before
        for step in steps:
            step += 1.0
