"""Which few factors explain measured damage, and how near that is to the best choice of as many.

The logarithm of the damage is regressed on factors, all relative to their mean over the decision
that they belong to: only what tells the states of one decision apart can guide it. A set of
factors is worth the variance that least squares on it explain, R^2. Forward selection adds the
factor that raises R^2 most. With gamma the submodularity ratio of R^2 around the chosen set, it
reaches at least 1 - exp(-gamma) of the best set of that size (Das and Kempe, Submodular meets
spectral, ICML 2011, theorem 3.2); the certificate holds that bound and the best set itself.

Knows numbers only: neither models nor states. Everything is deterministic.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

PLAIN = frozenset({"saturated", "radial_bias", "zeros", "depth"})
"""Factors that enter as they are, because they are shares or signed; all others as logarithms."""

LARGEST_POOL = 15
"""Factors among which every set can be tried."""

FOLDS = 5
SHUFFLES = 200
QUANTILE = 0.95

TOLERANCE = 1e-6
"""Gains in R^2 below this count as none."""

_SMALLEST = 2.0**-60
_DEPENDENT = 1e-9
"""Share of a factor's variance below which the others explain it wholly."""


@dataclass(frozen=True, slots=True)
class Observations:
    """Probes as a regression sees them.

    Attributes:
        names: The factors that vary.
        values: float64 `[probes, factors]`, relative to the mean of each decision.
        damage: float64 `[probes]`, logarithms, likewise.
        decisions: int64 `[probes]`, which decision a probe belongs to.
        folds: int64 `[probes]`, which part of the cross-validation it is held out in.
    """

    names: tuple[str, ...]
    values: Tensor
    damage: Tensor
    decisions: Tensor
    folds: Tensor

    @classmethod
    def of(
        cls,
        factors: Sequence[Mapping[str, float]],
        damages: Sequence[float],
        decisions: Sequence[Hashable],
        tensors: Sequence[Hashable],
    ) -> Observations:
        """Arrange probes.

        Args:
            factors: Factors of each probe by name, all with the same names.
            damages: Measured damages, above 0.
            decisions: The decision of each probe.
            tensors: Its tensor; probes of one tensor are held out together.

        Raises:
            ValueError: There are too few probes or too many factors, or a damage is not above 0.
        """
        if not all(damage > 0.0 for damage in damages):
            raise ValueError("a damage is not above 0, so it has no logarithm; leave that probe out")
        if len(set(tensors)) < 2:
            raise ValueError(f"the probes are of {len(set(tensors))} tensors; cross-validation needs 2 or more")
        decision, tensor = _numbered(decisions), _numbered(tensors)
        names = tuple(factors[0])
        columns = [[_transformed(name, row[name]) for name in names] for row in factors]
        values = _centred(torch.tensor(columns, dtype=torch.float64), decision)
        damage = _centred(torch.tensor(damages, dtype=torch.float64).log()[:, None], decision)[:, 0]
        if not bool(damage.any()):
            raise ValueError("the damages of a decision are all the same, so there is nothing to explain")
        varies = values.square().mean(0) > _DEPENDENT
        kept = tuple(name for name, keep in zip(names, varies.tolist(), strict=True) if keep)
        if len(kept) > LARGEST_POOL:
            raise ValueError(f"{len(kept)} factors vary, at most {LARGEST_POOL} can be compared; leave some out")
        return cls(kept, values[:, varies], damage, decision, tensor % min(FOLDS, len(set(tensors))))

    @property
    def scale(self) -> Tensor:
        """Standard deviation of each factor, `[factors]`."""
        return self.values.square().mean(0).sqrt()

    @property
    def standardised(self) -> Tensor:
        """The factors with variance 1."""
        return self.values / self.scale

    def weighted(self, exponents: Mapping[str, float]) -> Tensor:
        """Return the logarithm of a product of powers of factors, `[probes]`; a factor that is constant drops out."""
        present = [(self.names.index(name), power) for name, power in exponents.items() if name in self.names]
        return sum((power * self.values[:, column] for column, power in present), torch.zeros_like(self.damage))

    def shuffled(self, seed: int) -> Observations:
        """Return the same with the damages exchanged at random within each decision."""
        random = torch.rand(len(self.damage), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        damage = torch.empty_like(self.damage)
        damage[self.decisions.argsort(stable=True)] = self.damage[(self.decisions + random).argsort()]
        return replace(self, damage=damage)


@dataclass(frozen=True, slots=True)
class Certificate:
    """How near a choice of factors is to the best one of its size.

    Attributes:
        r2: Variance that the choice explains, 0 to 1.
        best: Names of the best set of that size.
        best_r2: Variance that it explains.
        gamma: Submodularity ratio, 0 to 1.
        bound: 1 - exp(-gamma): `r2` is at least this share of `best_r2`.
    """

    r2: float
    best: tuple[str, ...]
    best_r2: float
    gamma: float
    bound: float


@dataclass(frozen=True, slots=True)
class Selection:
    """The chosen factors and what speaks for them.

    Attributes:
        names: In the order of choice.
        coefficients: Change of the log damage per standard deviation of each factor.
        exponents: Change of the log damage per unit of each factor's value or logarithm.
        path: R^2 after each choice.
        certificate: Against all other sets of that size.
        cross_validated: R^2 on held-out tensors, choice and fit repeated without them; it may be negative.
        by_chance: 95 % quantile of the same with shuffled damages.
    """

    names: tuple[str, ...]
    coefficients: tuple[float, ...]
    exponents: tuple[float, ...]
    path: tuple[float, ...]
    certificate: Certificate
    cross_validated: float
    by_chance: float


def select(observations: Observations, size: int, shuffles: int = SHUFFLES) -> Selection:
    """Choose factors and judge the choice.

    Args:
        observations: The probes.
        size: How many factors.
        shuffles: Permutations of the damages behind `by_chance`.
    """
    factors, damage = observations.standardised, observations.damage
    chosen = forward(factors, damage, size).tolist()
    coefficients = fit(factors[:, chosen], damage)
    return Selection(
        names=tuple(observations.names[column] for column in chosen),
        coefficients=tuple(coefficients.tolist()),
        exponents=tuple((coefficients / observations.scale[chosen]).tolist()),
        path=tuple(explained(factors[:, chosen[:count]], damage) for count in range(1, len(chosen) + 1)),
        certificate=certify(observations, chosen),
        cross_validated=cross_validated(observations, size),
        by_chance=by_chance(observations, size, shuffles),
    )


def forward(factors: Tensor, damage: Tensor, size: int) -> Tensor:
    """Return the columns that forward selection takes, in order: int64 `[..., size]`.

    Args:
        factors: float64 `[probes, factors]`, centred, of variance 1.
        damage: float64 `[..., probes]`, centred; each row is a selection of its own.
        size: Columns to take; all if there are no more.
    """
    count = factors.shape[1]
    whole = factors.square().sum(0)
    rest, unexplained = factors.expand(*damage.shape[:-1], *factors.shape), damage
    chosen = torch.empty(*damage.shape[:-1], 0, dtype=torch.int64)
    for _ in range(min(size, count)):
        length = rest.square().sum(-2)
        gain = torch.where(length > _DEPENDENT * whole, _inner(rest, unexplained).square() / length, 0.0)
        column = gain.scatter(-1, chosen, -1.0).argmax(-1, keepdim=True)
        chosen = torch.cat([chosen, column], -1)
        direction = rest.gather(-1, column[..., None, :].expand(*rest.shape[:-1], 1))[..., 0]
        direction = direction / direction.square().sum(-1, keepdim=True).clamp(min=_SMALLEST).sqrt()
        unexplained = unexplained - direction * (direction * unexplained).sum(-1, keepdim=True)
        rest = rest - direction[..., None] * _inner(rest, direction)[..., None, :]
    return chosen


def fit(factors: Tensor, damage: Tensor) -> Tensor:
    """Return the coefficients of least squares, `[..., factors]`; the shortest ones if they are not unique."""
    found: Tensor = torch.linalg.lstsq(factors, damage[..., None], driver="gelsd").solution
    return found[..., 0]


def explained(factors: Tensor, damage: Tensor) -> float:
    """Return R^2 of least squares on these factors."""
    return predicted(factors, damage, fit(factors, damage))


def predicted(factors: Tensor, damage: Tensor, coefficients: Tensor) -> float:
    """Return R^2 of a prediction with given coefficients; negative if it is worse than none."""
    whole = float(damage.square().sum())
    return 1.0 - float((damage - factors @ coefficients).square().sum()) / whole if whole > 0.0 else 0.0


def certify(observations: Observations, chosen: Sequence[int]) -> Certificate:
    """Compare a choice with every set of its size and compute its submodularity ratio.

    With U the chosen set, k its size and f = R^2, gamma is the minimum over L within U and S
    apart from L, of at most k factors, of  sum over x in S of (f(L + x) - f(L)) / (f(L + S) - f(L)).
    """
    value = _every_set(observations, min(2 * len(chosen), len(observations.names)))
    size, columns = len(chosen), range(len(observations.names))
    best = max(itertools.combinations(columns, size), key=lambda columns: value[_mask(columns)])
    gamma = 1.0
    for base in _subsets(chosen, size):
        known = _mask(base)
        gains = {column: value[known | 1 << column] - value[known] for column in columns if column not in base}
        for others in _subsets(tuple(gains), size):
            joint = value[known | _mask(others)] - value[known]
            if joint > TOLERANCE:
                gamma = min(gamma, math.fsum(gains[column] for column in others) / joint)
    return Certificate(
        r2=value[_mask(chosen)],
        best=tuple(observations.names[column] for column in best),
        best_r2=value[_mask(best)],
        gamma=gamma,
        bound=1.0 - math.exp(-gamma),
    )


def cross_validated(observations: Observations, size: int) -> float:
    """Return R^2 on tensors that neither the choice of factors nor the fit has seen."""
    return float(_held_out(observations, observations.damage[None], size))


def by_chance(observations: Observations, size: int, shuffles: int = SHUFFLES) -> float:
    """Return the 95 % quantile of `cross_validated` over shuffled damages, seeds 0 to `shuffles` - 1."""
    damages = torch.stack([observations.shuffled(seed).damage for seed in range(shuffles)])
    return float(_held_out(observations, damages, size).quantile(QUANTILE))


def _held_out(observations: Observations, damages: Tensor, size: int) -> Tensor:
    """Cross-validated R^2 for each row of damages."""
    factors = observations.standardised
    missed = torch.zeros(len(damages), dtype=torch.float64)
    for held_out in _parts(observations.folds):
        seen, unseen, damage = factors[~held_out], factors[held_out], damages[:, ~held_out]
        chosen = forward(seen, damage, size)
        coefficients = fit(seen.t()[chosen].mT, damage)
        guess = _inner(unseen.t()[chosen], coefficients)
        missed += (damages[:, held_out] - guess).square().sum(-1)
    return 1.0 - missed / damages.square().sum(-1)


def transferred(seen: Observations, unseen: Observations, size: int) -> float:
    """Return R^2 on other observations with factors and exponents that these choose."""
    shared = [name for name in seen.names if name in unseen.names]
    columns = seen.standardised[:, [seen.names.index(name) for name in shared]]
    chosen = forward(columns, seen.damage, size).tolist()
    exponents = fit(columns[:, chosen], seen.damage) / columns.new_tensor(
        [float(seen.scale[seen.names.index(shared[column])]) for column in chosen]
    )
    values = unseen.values[:, [unseen.names.index(shared[column]) for column in chosen]]
    return predicted(values, unseen.damage, exponents)


def rank_correlation(values: Tensor, observations: Observations) -> float:
    """Return Spearman's correlation of values with the damage, averaged over the decisions."""
    found = []
    for rows in _parts(observations.decisions):
        ranks = torch.stack([part[rows].argsort().argsort().double() for part in (values, observations.damage)])
        if int(rows.sum()) > 1:
            found.append(float(torch.corrcoef(ranks)[0, 1]))
    return math.fsum(found) / len(found)


def _transformed(name: str, value: float) -> float:
    return value if name in PLAIN else math.log(max(value, _SMALLEST))


def _numbered(keys: Sequence[Hashable]) -> Tensor:
    """Number keys in the order in which they first come."""
    order = {key: position for position, key in enumerate(dict.fromkeys(keys))}
    return torch.tensor([order[key] for key in keys])


def _inner(columns: Tensor, vector: Tensor) -> Tensor:
    """Inner products over the last but one dimension: `[..., n, k]` and `[..., n]` to `[..., k]`."""
    return (vector[..., None, :] @ columns)[..., 0, :]


def _parts(numbers: Tensor) -> Iterator[Tensor]:
    """Yield for each number which rows have it."""
    for number in range(int(numbers.max()) + 1):
        yield numbers == number


def _centred(values: Tensor, decisions: Tensor) -> Tensor:
    centred = values.clone()
    for rows in _parts(decisions):
        centred[rows] -= values[rows].mean(0)
    return centred


def _every_set(observations: Observations, largest: int) -> dict[int, float]:
    """R^2 of every set of up to `largest` factors; the bits of a key are its columns."""
    factors, damage = observations.standardised, observations.damage
    among = factors.t() @ factors / len(damage)
    toward = factors.t() @ damage / (damage.square().sum() * len(damage)).sqrt()
    value = {0: 0.0}
    for size in range(1, largest + 1):
        sets = list(itertools.combinations(range(len(observations.names)), size))
        index = torch.tensor(sets)
        eigenvalues, vectors = torch.linalg.eigh(among[index[:, :, None], index[:, None, :]])
        along = (vectors * toward[index][:, :, None]).sum(1)
        gains = torch.where(eigenvalues > _DEPENDENT, along.square() / eigenvalues, 0.0).sum(1)
        value.update(zip(map(_mask, sets), gains.tolist(), strict=True))
    return value


def _subsets(columns: Sequence[int], largest: int) -> list[tuple[int, ...]]:
    return [found for size in range(largest + 1) for found in itertools.combinations(columns, size)]


def _mask(columns: Sequence[int]) -> int:
    return sum(1 << column for column in columns)
