"""Which format each state should have: the least damage that fits, or the least bytes that hold a damage.

States are rows of two tables, one column for each format by growing bytes: what it costs and the
damage it does. Along the lower convex hull of its row a state grows by increments of falling
price, the damage saved per byte. Increments are taken from the highest price on until the budget
is spent (Fox, "Discrete Optimization via Marginal Analysis", 1966; Shoham and Gersho, "Efficient
Bit Allocation for an Arbitrary Set of Quantizers", 1988); the price at which that happens is found
by bisection on the bit patterns of doubles among the increments that are still open, so the work
is linear in the number of states. What then is left goes to increments that still fit.

Sums that decide are of integers and comparisons are of single doubles, so that the order of
summation, and with it machine and thread count, cannot change a result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stquant.errors import BudgetError

FILL_ROUNDS = 16
"""Rounds in which what is left of a budget is spent; each lets a state grow by one format."""

_DAMAGE_UNITS = 2.0**40
"""Units in which damages are summed, relative to the largest sum."""


@dataclass(frozen=True, slots=True)
class Table:
    """What states cost and how much damage they do in each of their formats.

    Attributes:
        bytes: int64 `[states, formats]`, growing along a row. A state with fewer formats than
            others repeats its last one.
        damage: float64 `[states, formats]`, not negative.
    """

    bytes: Tensor
    damage: Tensor

    @classmethod
    def of(cls, bytes: Sequence[Sequence[int]], damage: Sequence[Sequence[float]]) -> Table:
        """Build a table from rows, which may differ in length."""
        width = max((len(row) for row in bytes), default=1)

        def padded(rows: Sequence[Sequence[float]]) -> list[list[float]]:
            return [[*row, *[row[-1]] * (width - len(row))] for row in rows]

        return cls(
            torch.tensor(padded(bytes), dtype=torch.int64).reshape(-1, width),
            torch.tensor(padded(damage), dtype=torch.float64).reshape(-1, width),
        )

    @property
    def least(self) -> int:
        """Bytes of every state in its smallest format."""
        return int(self.bytes[:, 0].sum())

    def cost(self, choice: Tensor) -> int:
        """Bytes of a choice of formats, int64 `[states]`."""
        return int(self.bytes.gather(1, choice[:, None]).sum())


def within_bytes(table: Table, budget: int, hull: Hull | None = None) -> Tensor:
    """Choose the formats that do the least damage within a budget.

    The total damage is within one increment of one state of the best possible, and the best
    possible if no increment had to be skipped.

    Args:
        table: The states.
        budget: Bytes allowed.
        hull: That of the table, if it is known.

    Returns:
        int64 `[states]`: the column of each state.

    Raises:
        BudgetError: Even the smallest formats take more.
    """
    if table.least > budget:
        raise BudgetError(f"{budget:,} bytes were allowed, the smallest formats take {table.least:,}")
    hull = hull or Hull.of(table)
    start = torch.zeros(len(table.bytes), dtype=torch.int64)
    return hull.fill(start, budget - table.least)


def within_damage(table: Table, damage: float, hull: Hull | None = None) -> Tensor:
    """Choose the fewest bytes whose damage, along the hull, stays within a limit.

    Args:
        table: The states.
        damage: Total damage allowed. If even the largest formats do more, they are chosen.
        hull: That of the table, if it is known.

    Returns:
        int64 `[states]`: the column of each state.
    """
    hull = hull or Hull.of(table)
    unit = float(table.damage.amax()) * len(table.damage) / _DAMAGE_UNITS if table.damage.numel() else 0.0
    if unit == 0.0:
        return torch.zeros(len(table.bytes), dtype=torch.int64)
    # Rounded so that what is saved is never overrated.
    saved = (hull.saved / unit).floor().long()
    missing = int((table.damage[:, 0] / unit).ceil().long().sum()) - math.floor(damage / unit)
    taken = _dearest(hull.prices, saved, missing - 1)
    if missing > 0:
        rest = torch.where(taken, -1.0, hull.prices)
        taken |= (rest == rest.amax()) & (rest > 0)
    return _last(taken)


@dataclass(frozen=True, slots=True)
class Hull:
    """The increments along the lower convex hulls of a table's rows.

    Attributes:
        prices: float64 `[states, formats]`: damage saved per byte by the increment that ends at a
            format, falling along a row; negative where none ends.
        steps: int64, its bytes.
        saved: float64, the damage it saves.
    """

    prices: Tensor
    steps: Tensor
    saved: Tensor

    @classmethod
    def of(cls, table: Table) -> Hull:
        """Find the increments; of points on a straight line only the ends count."""
        states, width = table.bytes.shape
        hull = cls(
            torch.full((states, width), -1.0, dtype=torch.float64),
            torch.zeros((states, width), dtype=torch.int64),
            torch.zeros((states, width), dtype=torch.float64),
        )
        here = torch.zeros(states, dtype=torch.int64)
        columns = torch.arange(width)
        # The columns that only pad a row cost what the one before them does.
        real = torch.diff(table.bytes, dim=1, prepend=table.bytes[:, :1] - 1) > 0
        for _ in range(width - 1):
            steps = table.bytes - table.bytes.gather(1, here[:, None])
            saved = table.damage.gather(1, here[:, None]) - table.damage
            price = torch.where(real & (columns > here[:, None]), saved / steps.clamp(min=1), -1.0)
            best = price.amax(1)
            following = torch.where(price == best[:, None], columns, -1).amax(1)
            moves = best > 0
            if not bool(moves.any()):
                break
            at = moves.nonzero()[:, 0], following[moves]
            hull.prices[at], hull.steps[at], hull.saved[at] = best[moves], steps[at], saved[at]
            here = torch.where(moves, following, here)
        return hull

    def fill(self, choice: Tensor, left: int) -> Tensor:
        """Let states grow by increments of falling price while they fit.

        Args:
            choice: Columns to start from, int64 `[states]`: points of the hull.
            left: Bytes to spend.
        """
        columns = torch.arange(self.prices.shape[1])
        taken = _dearest(torch.where(columns > choice[:, None], self.prices, -1.0), self.steps, left)
        left -= int(self.steps[taken].sum())
        choice = torch.maximum(choice, _last(taken))
        for _ in range(FILL_ROUNDS):
            ahead = (columns > choice[:, None]) & (self.prices > 0)
            following = torch.where(ahead, columns, self.prices.shape[1]).amin(1, keepdim=True)
            grows = following[:, 0] < self.prices.shape[1]
            following = following.clamp(max=self.prices.shape[1] - 1)
            step = self.steps.gather(1, following)[:, 0]
            price = torch.where(grows & (step <= left), self.prices.gather(1, following)[:, 0], -1.0)
            chosen = _dearest(price, step, left)
            spare = left - int(step[chosen].sum())
            # Those that follow share one price and do not fit together: as many as do, in order.
            rest = torch.where(chosen | (step > spare), -1.0, price)
            tied = (rest == rest.amax()) & (rest > 0) if len(rest) else chosen
            chosen |= tied & (torch.where(tied, step, 0).cumsum(0) <= spare)
            if not bool(chosen.any()):
                break
            left -= int(step[chosen].sum())
            choice = torch.where(chosen, following[:, 0], choice)
        return choice


def _dearest(price: Tensor, weight: Tensor, limit: int) -> Tensor:
    """Choose the entries of the highest prices whose weights sum to at most `limit`.

    Entries of one price are taken together or not at all; those of no positive price never.
    """
    taken = torch.zeros(price.numel(), dtype=torch.bool)
    patterns, weights = price.flatten().view(torch.int64), weight.flatten()
    open = (price.flatten() > 0).nonzero()[:, 0]
    while open.numel():
        pattern = patterns[open]
        low, high = int(pattern.min()), int(pattern.max())
        above = pattern > low + (high - low) // 2 if low < high else pattern == high
        total = int(weights[open[above]].sum())
        if total <= limit:
            limit -= total
            taken[open[above]] = True
            open = open[~above]
        elif low == high:
            break
        else:
            open = open[above]
    return taken.view(price.shape)


def _last(taken: Tensor) -> Tensor:
    """Last column taken in each row, 0 if none is."""
    return torch.where(taken, torch.arange(taken.shape[1]), 0).amax(1)
