"""The constants of a step, in double precision on the host.

With b1 and b2 the decay rates and t the parameter's step,

    bc1 = 1 - b1**t    bc2 = 1 - b2**t    c_t = bc1**2 * sum over k >= 1 of b1**k / (1 - b1**(t + k))

The sum is what an error in the momentum would still have moved the weight by, in units of
lr * error / denominator, and c_t the part of it that is applied; see docs/numerics.md, "Prepay".
"""

from __future__ import annotations

import functools
import math
import struct
from typing import Any, NamedTuple

from stquant.kernels.ops import AdamRule, LionRule, SGDRule

_SETTLED = 2.0**-30
"""b1**t below this changes no fp32 result, nor does a longer table."""


def correction_of(beta: float, step: int) -> float:
    """Return 1 - beta**step."""
    return 1.0 - beta**step


def settles_at(beta: float) -> int:
    """Return a step from which on `correction_of` is 1 to the last bit, as 2**-54 is lost in the difference."""
    return 1 if beta == 0.0 else math.ceil(-54 * math.log(2.0) / math.log(beta)) + 1


def prepay_factor(beta: float, step: int) -> float:
    """Return c_t of a momentum with decay rate `beta` at `step`; 0 for beta 0."""
    table = prepay_table(beta)
    return table[min(step, len(table) - 1)]


@functools.lru_cache(maxsize=8)
def prepay_table(beta: float) -> tuple[float, ...]:
    """Return c_t for t = 0, 1, ... until it has settled; its sums s_t = b / (1 - b**(t+1)) + b * s_(t+1)."""
    if beta == 0.0:
        return (0.0,)
    last = math.ceil(math.log(_SETTLED) / math.log(beta))
    sums = [beta / (1.0 - beta)]
    for step in range(last - 1, -1, -1):
        sums.append(beta / (1.0 - beta ** (step + 1)) + beta * sums[-1])
    return tuple(correction_of(beta, step) ** 2 * ahead for step, ahead in enumerate(reversed(sums)))


class AdamConstants(NamedTuple):
    """Folded constants of one parameter's step; the square root of bc2 moves out of the division.

    With root = sqrt(bc2) the update  lr * (m/bc1 + c_t * e) / (sqrt(v/bc2) + eps)  becomes
    (momentum * m + error * e) / (sqrt(v) + eps).
    """

    beta1: float
    beta1_rest: float
    beta2: float
    beta2_rest: float
    keep: float
    """Factor of decoupled weight decay: 1 - lr * weight_decay."""
    decay: float
    """Factor of coupled weight decay: added to the gradient."""
    momentum: float
    error: float
    eps: float

    @classmethod
    def of(cls, rule: AdamRule, step: int, single: bool = True) -> AdamConstants:
        """Fold the constants of `rule` at a step, each rounded once to fp32 unless not `single`."""
        beta1, beta2 = rule.betas
        root, correction = math.sqrt(correction_of(beta2, step)), correction_of(beta1, step)
        return cls(*_rounded(fold_adam(rule, rule.lr, root, correction, prepay_factor(beta1, step)), single))


class SGDConstants(NamedTuple):
    """Constants of an SGD step.

    What an error in the momentum would still have moved the weight by is `error`: with mu the
    momentum, lr * (mu + mu**2 + ...) = lr * mu / (1 - mu), and mu times that for nesterov, whose
    step applies the momentum once more damped.
    """

    lr: float
    momentum: float
    rest: float
    """1 - dampening."""
    decay: float
    error: float

    @classmethod
    def of(cls, rule: SGDRule, single: bool = True) -> SGDConstants:
        """Fold the constants of `rule`, each rounded once to fp32 unless not `single`."""
        mu = rule.momentum
        ahead = mu / (1.0 - mu) if mu < 1.0 else 0.0
        error = rule.lr * ahead * (mu if rule.nesterov else 1.0)
        return cls(*_rounded((rule.lr, mu, 1.0 - rule.dampening, rule.weight_decay, error), single))


class LionConstants(NamedTuple):
    """Constants of a Lion step; `keep` is 1 - lr * weight_decay."""

    lr: float
    beta1: float
    beta1_rest: float
    beta2: float
    beta2_rest: float
    keep: float

    @classmethod
    def of(cls, rule: LionRule, single: bool = True) -> LionConstants:
        """Fold the constants of `rule`, each rounded once to fp32 unless not `single`."""
        return cls(*_rounded(fold_lion(rule, rule.lr), single))


def fold_adam(rule: AdamRule, lr: Any, root: Any, correction: Any, prepay: Any) -> tuple[Any, ...]:
    """Return `AdamConstants` before rounding, of doubles or of tensors of doubles.

    Args:
        rule: The other hyperparameters.
        lr: The learning rate.
        root: Square root of bc2.
        correction: bc1.
        prepay: c_t.
    """
    beta1, beta2 = rule.betas
    return (
        beta1,
        1.0 - beta1,
        beta2,
        1.0 - beta2,
        1.0 - lr * rule.weight_decay if rule.decoupled else 1.0,
        0.0 if rule.decoupled else rule.weight_decay,
        lr * root / correction,
        lr * root * prepay,
        rule.eps * root,
    )


def fold_lion(rule: LionRule, lr: Any) -> tuple[Any, ...]:
    """Return `LionConstants` before rounding, of doubles or of tensors of doubles."""
    beta1, beta2 = rule.betas
    return (lr, beta1, 1.0 - beta1, beta2, 1.0 - beta2, 1.0 - lr * rule.weight_decay)


def _rounded(exact: tuple[float, ...], single: bool) -> tuple[float, ...]:
    layout = f"{len(exact)}f"
    return struct.unpack(layout, struct.pack(layout, *exact)) if single else exact
