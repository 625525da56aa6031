"""The AdamW step of the compiled kernels equals the reference, to the bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from stquant.kernels import cpu, reference
from tests.cases import NON_NEGATIVE, SIGNED, name
from tests.parity import helpers
from tests.parity.helpers import ADAMW, Case

ROWS = (1, 31, 33, 127, 128, 129, 257, 1000, 4097)


def check(cases: list[Case], rule=ADAMW, steps: int = 10) -> None:
    truth = helpers.run(reference.adam_step_, cases, rule, steps)
    for isa in cpu.instruction_sets():
        cpu.use(isa)
        ours = helpers.run(cpu.adam_step_, cases, rule, steps)
        helpers.assert_equal(ours, truth, cases)


@pytest.mark.parametrize("first", [*SIGNED, None], ids=name)
def test_formats(first) -> None:
    seconds = [f.name for f in NON_NEGATIVE] + ["fp32"]
    m = "fp32" if first is None else first.name
    check([Case({"exp_avg": m, "exp_avg_sq": second}, (3, ROWS[i % 9])) for i, second in enumerate(seconds)])
