"""The SGD and Lion steps of the compiled kernels equal the reference to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from stquant.kernels import cpu, reference
from stquant.kernels.ops import LionRule, SGDRule
from tests.cases import SIGNED
from tests.parity import helpers
from tests.parity.helpers import Case

pytestmark = pytest.mark.skipif(cpu.REASON is not None, reason="the compiled kernels are not installed")

SGD = SGDRule(lr=0.1, momentum=0.9, dampening=0.0, weight_decay=1e-2, nesterov=False, maximize=False, seed=3)
LION = LionRule(lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1, maximize=False, seed=3)
RULES = {
    "momentum": SGD,
    "dampening": replace(SGD, dampening=0.3, maximize=True),
    "nesterov": replace(SGD, nesterov=True, weight_decay=0.0),
    "no momentum": replace(SGD, momentum=0.0),
    "lion": LION,
    "lion, maximize": replace(LION, maximize=True, weight_decay=0.0),
}


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    yield
    cpu.use("")


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rules(rule: SGDRule | LionRule, dtype: torch.dtype) -> None:
    lion = isinstance(rule, LionRule)
    name = "exp_avg" if lion else "momentum_buffer"
    formats = [format.name for format in SIGNED] + ["fp32"]
    residual = 4 if dtype is torch.bfloat16 else 0
    cases = [
        Case(
            {} if rule == RULES["no momentum"] else {name: format},
            (3, (33, 128, 257, 1000)[i % 4]),
            dtype,
            dtype,
            residual=residual if i % 2 else 0,
            stochastic=i % 3 > 0,
            non_finite=i % 2 == 1,
        )
        for i, format in enumerate(formats)
    ]
    truth = helpers.run(reference.lion_step_ if lion else reference.sgd_step_, cases, rule)
    for isa in cpu.instruction_sets():
        cpu.use(isa)
        ours = helpers.run(cpu.lion_step_ if lion else cpu.sgd_step_, cases, rule)
        helpers.assert_equal(ours, truth, cases)
