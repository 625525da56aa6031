"""The full product of the parity table: formats x dtypes x rows x blocks x roundings x instruction sets.

The tests take a covering part of it. Stops at the first difference. Run: PYTHONPATH=. python benchmarks/parity_full.py
"""

from __future__ import annotations

import itertools

import torch
from tests.cases import NON_NEGATIVE, SIGNED
from tests.parity import helpers

from stquant.kernels import cpu, reference

ROWS = (1, 31, 33, 127, 128, 129, 257, 1000, 4097)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BLOCKS = (32, 128, 1024)


def main() -> None:
    firsts = [format.name for format in SIGNED] + ["fp32"]
    seconds = [format.name for format in NON_NEGATIVE] + ["fp32"]
    for number, (first, second) in enumerate(itertools.product(firsts, seconds)):
        cases = [
            helpers.Case(
                {"exp_avg": first, "exp_avg_sq": second},
                (2, row),
                dtype,
                grad_dtype,
                block,
                residual if dtype is torch.bfloat16 else 0,
                stochastic,
                non_finite=True,
            )
            for row, dtype, grad_dtype, block in itertools.product(ROWS, DTYPES, DTYPES, BLOCKS)
            for residual in ((0, *range(1, 9), 16) if dtype is torch.bfloat16 else (0,))
            for stochastic in ((False, True) if dtype is not torch.float32 else (False,))
        ]
        truth = helpers.run(reference.adam_step_, cases, helpers.ADAMW, 10)
        for isa in cpu.instruction_sets():
            cpu.use(isa)
            helpers.assert_equal(helpers.run(cpu.adam_step_, cases, helpers.ADAMW, 10), truth, cases)
        print(f"{number + 1} of {len(firsts) * len(seconds)}: {first} + {second}, {len(cases)} cases", flush=True)


if __name__ == "__main__":
    main()
