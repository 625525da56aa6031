"""From what is best to what is done: few changes, shrinks first, never above the limit.

A plan for the present damages differs from the last one by noise alone, so a state changes only if
it would also at a price half as high again, or as low; and a state that has changed then rests
for some decisions. What is predicted to be best is followed at once only where the limit demands.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stquant.policy.allocator import Hull, Table, within_bytes, within_damage

REST = 3
"""Decisions for which a state keeps its format after a change."""

DEADBAND = 1.5
"""Factor by which the price of a byte must be missed before a state changes."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be done.

    Attributes:
        choice: Column of each state in the table, int64 `[states]`.
        price: Damage that the next byte would save; 0 if nothing more can be saved.
    """

    choice: Tensor
    price: float


def plan(table: Table, current: Tensor, resting: Tensor, limit: int | None, damage: float) -> Plan:
    """Decide which states change.

    Args:
        table: Bytes and damages of the states.
        current: Present columns, int64 `[states]`.
        resting: States that keep their column, bool `[states]`.
        limit: Bytes allowed; None if the damage is limited.
        damage: Total damage allowed, where bytes are not limited.

    Returns:
        A plan within the limit. States rest, unless the limit cannot be kept otherwise.

    Raises:
        BudgetError: Even the smallest formats take more than the limit.
    """
    held = _held(table, current, resting)
    if limit is not None and held.least > limit:
        held, resting = table, torch.zeros_like(resting)
    hull = Hull.of(held)
    target = within_damage(held, damage, hull) if limit is None else within_bytes(held, limit, hull)
    price = _next_price(hull, target)
    choice = _damped(hull, current, target, price)
    if limit is None:
        missed = float(held.damage.gather(1, choice[:, None]).sum()) > damage
        choice = torch.maximum(choice, target) if missed else choice
    else:
        choice = torch.minimum(choice, target) if held.cost(choice) > limit else choice
        choice = _spend(held, hull, choice, limit)
    return Plan(torch.where(resting, current, choice), price)


def _held(table: Table, current: Tensor, resting: Tensor) -> Table:
    """The table in which resting states have one format only."""
    here = current[:, None]
    return Table(
        torch.where(resting[:, None], table.bytes.gather(1, here), table.bytes),
        torch.where(resting[:, None], table.damage.gather(1, here), table.damage),
    )


def _next_price(hull: Hull, choice: Tensor) -> float:
    columns = torch.arange(hull.prices.shape[1])
    ahead = torch.where(columns > choice[:, None], hull.prices, 0.0)
    return float(ahead.amax().clamp(min=0.0)) if ahead.numel() else 0.0


def _damped(hull: Hull, current: Tensor, target: Tensor, price: float) -> Tensor:
    """Keep a state whose column lies between those of a lower and of a higher price."""
    columns = torch.arange(hull.prices.shape[1])
    fewest = torch.where(hull.prices > price * DEADBAND, columns, 0).amax(1)
    most = torch.where(hull.prices > price / DEADBAND, columns, 0).amax(1)
    useful = (hull.prices.gather(1, current[:, None])[:, 0] > 0) | (current == 0)
    stays = useful & (torch.minimum(fewest, target) <= current) & (current <= torch.maximum(most, target))
    return torch.where(stays, current, target)


def _spend(table: Table, hull: Hull, choice: Tensor, limit: int) -> Tensor:
    """Let states grow into what the damping left over; those that are on their hull can."""
    on_hull = (hull.prices.gather(1, choice[:, None])[:, 0] > 0) | (choice == 0)
    growing = Hull(torch.where(on_hull[:, None], hull.prices, -1.0), hull.steps, hull.saved)
    return growing.fill(choice, limit - table.cost(choice))
