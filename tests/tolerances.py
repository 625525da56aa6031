"""Every tolerance of the tests, with its reason."""

ULP = 2.0**-23
"""Distance of neighbouring fp32 values relative to their power of two."""

HALF_ULP = 2.0**-24
"""Largest relative error of one correctly rounded fp32 operation."""

STANDARD_ERRORS = 4.0
"""A mean over random draws lies within 4 standard errors in 99.99 % of runs; seeds are fixed."""


def torch_bound(steps: int, largest_weight: float, sum_of_lr: float) -> float:
    """Allowed difference to torch's fp32 optimizers after many steps.

    Both round each step's weight and update a few times in another order; the update is of the
    order of the learning rate, so half an ulp of weight and learning rate per step covers them.
    """
    return steps * HALF_ULP * (largest_weight + sum_of_lr)
