"""The allocator against the exact optimum, and how its work grows."""

from __future__ import annotations

import random

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stquant.errors import BudgetError
from stquant.policy.allocator import Hull, Table, within_bytes, within_damage

INSTANCES = 1000


def instance(source: random.Random) -> tuple[list[list[int]], list[list[float]]]:
    """Up to 12 states of up to 8 formats; damages may rise, repeat and vanish."""
    costs, damages = [], []
    for _ in range(source.randint(1, 12)):
        width = source.randint(1, 8)
        cost = sorted(source.sample(range(1, 25), width))
        kind = source.random()
        if kind < 0.4:
            weight = 10 ** source.uniform(-3, 3)
            damage = [weight * 0.25**column * source.uniform(0.7, 1.3) for column in range(width)]
        elif kind < 0.8:
            damage = [source.random() for _ in range(width)]
        else:
            damage = [float(source.randint(0, 3)) for _ in range(width)]
        costs.append(cost)
        damages.append(damage)
    return costs, damages


def optimum(costs: list[list[int]], damages: list[list[float]], budget: int) -> float:
    """Dynamic programming over bytes."""
    best = [0.0] * (budget + 1)
    for cost, damage in zip(costs, damages, strict=True):
        best = [
            min((best[left - c] + d for c, d in zip(cost, damage, strict=True) if c <= left), default=float("inf"))
            for left in range(budget + 1)
        ]
    return best[budget]


def largest_increment(table: Table) -> float:
    """Most damage that one step along a hull saves."""
    return float(Hull.of(table).saved.max())


def on_hull(table: Table, price: float) -> torch.Tensor:
    """What each state alone would choose at a price."""
    hull = Hull.of(table)
    return torch.where(hull.prices > price, torch.arange(hull.prices.shape[1]), 0).amax(1)


def total(table: Table, choice: torch.Tensor) -> float:
    return float(table.damage.gather(1, choice[:, None]).sum())


def test_within_one_increment_of_the_optimum() -> None:
    exact = 0
    for seed in range(INSTANCES):
        source = random.Random(seed)
        costs, damages = instance(source)
        least, most = sum(row[0] for row in costs), sum(row[-1] for row in costs)
        budget = source.randint(least, most)
        table = Table.of(costs, damages)
        choice = within_bytes(table, budget)
        best = optimum(costs, damages, budget)
        gap = total(table, choice) - best
        assert table.cost(choice) <= budget
        assert -1e-9 * max(1.0, best) <= gap <= largest_increment(table) + 1e-9 * max(1.0, best)
        exact += gap <= 1e-9 * max(1.0, best)
    assert exact > INSTANCES / 3, "a fair share of the instances must come out exact"


def test_exact_where_no_increment_is_skipped() -> None:
    for seed in range(INSTANCES):
        source = random.Random(seed)
        costs, damages = instance(source)
        table = Table.of(costs, damages)
        # What a price buys fits its own cost with nothing left over, so nothing was skipped.
        price = 10 ** source.uniform(-4, 2)
        budget = table.cost(on_hull(table, price))
        best = optimum(costs, damages, budget)
        assert total(table, within_bytes(table, budget)) == pytest.approx(best, rel=1e-9, abs=1e-12)


def test_equal_states_share_a_budget_to_the_last_byte_that_helps() -> None:
    table = Table.of([[10, 20, 40]] * 100, [[16.0, 4.0, 1.0]] * 100)
    for budget, at_second in ((1000, 0), (1009, 0), (1010, 1), (1555, 55), (2000, 100)):
        assert within_bytes(table, budget).tolist() == [1] * at_second + [0] * (100 - at_second)


def test_a_budget_below_the_least_raises_and_names_it() -> None:
    with pytest.raises(BudgetError, match="the smallest formats take 30"):
        within_bytes(Table.of([[10, 20], [20, 30]], [[1.0, 0.0]] * 2), 29)


def test_fewest_bytes_within_a_damage() -> None:
    for seed in range(60):
        source = random.Random(seed)
        costs, damages = instance(source)
        table = Table.of(costs, damages)
        least = total(table, on_hull(table, 0.0))
        limit = least + source.random() * (total(table, on_hull(table, torch.inf)) - least) + 1e-9
        choice = within_damage(table, limit)
        assert total(table, choice) <= limit * (1 + 1e-9)
        for price in Hull.of(table).prices.flatten().tolist():
            other = on_hull(table, max(price, 0.0))
            assert total(table, other) > limit * (1 - 1e-9) or table.cost(other) >= table.cost(choice)


def test_no_states() -> None:
    assert within_bytes(Table.of([], []), 0).tolist() == []
    assert within_damage(Table.of([], []), 0.0).tolist() == []


class Counted(TorchDispatchMode):
    """Counts the elements that torch operations return."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        self.elements += result.numel() if isinstance(result, torch.Tensor) else 0
        return result


def test_work_grows_linearly() -> None:
    def work(states: int) -> float:
        generator = torch.Generator().manual_seed(states)
        size = 10 ** (3 * torch.rand(states, 1, generator=generator, dtype=torch.float64) + 3)
        bits = torch.tensor([0, 1, 2, 3, 4, 5, 6, 8], dtype=torch.float64)
        noise = 0.5 + torch.rand(states, 8, generator=generator, dtype=torch.float64)
        table = Table((size * (bits + 0.25) / 8).long(), size * 0.25**bits * noise)
        with Counted() as counted:
            choice = within_bytes(table, 2 * table.least)
        assert table.least < table.cost(choice) <= 2 * table.least
        return counted.elements / states

    small, *larger = [work(states) for states in (100, 1_000, 10_000, 100_000)]
    # The number of filling rounds may differ by a few; a logarithm would be a factor of 2.5.
    assert max(larger) < 2 * small
