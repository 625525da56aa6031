"""The full product of the parity table: formats x dtypes x rows x blocks x residuals x roundings, per instruction set.

The tests take a covering part of it; all of it takes many hours, most of them in the reference. So
cases are taken in an order that a seed draws, for as many minutes as wanted, and a later run goes on
where the last one ended. Stops at the first difference. Writes `results/parity_full.json`.
Run: PYTHONPATH=. python benchmarks/parity_full.py [--minutes 15] [--seed 0] [--restart]
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import random
import time
from pathlib import Path

import torch
from tests.cases import NON_NEGATIVE, SIGNED
from tests.parity import helpers

from stquant.kernels import cpu, reference

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "benchmarks" / "results" / "parity_full.json"
ROWS = (1, 31, 33, 127, 128, 129, 257, 1000, 4097)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BLOCKS = (32, 128, 1024)
STEPS = 10
BATCH = 50
"""Cases of one call."""


def product() -> list[helpers.Case]:
    """Return every case, in the order of the loops."""
    firsts = [format.name for format in SIGNED] + ["fp32"]
    seconds = [format.name for format in NON_NEGATIVE] + ["fp32"]
    return [
        helpers.Case(
            {"exp_avg": first, "exp_avg_sq": second},
            (2, row),
            dtype,
            grad_dtype,
            block,
            residual,
            stochastic,
            non_finite=True,
        )
        for first, second in itertools.product(firsts, seconds)
        for row, dtype, grad_dtype, block in itertools.product(ROWS, DTYPES, DTYPES, BLOCKS)
        for residual in ((0, *range(1, 9), 16) if dtype is torch.bfloat16 else (0,))
        for stochastic in ((False, True) if dtype is not torch.float32 else (False,))
    ]


def check(cases: list[helpers.Case], seed: int) -> None:
    """Raise unless every instruction set equals the reference to the bit after all steps."""
    truth = helpers.run(reference.adam_step_, cases, helpers.ADAMW, STEPS, seed)
    for isa in cpu.instruction_sets():
        cpu.use(isa)
        helpers.assert_equal(helpers.run(cpu.adam_step_, cases, helpers.ADAMW, STEPS, seed), truth, cases)


def kernels() -> str:
    """Return a digest of the kernels' sources; results of other kernels are not gone on with."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "csrc").rglob("*.[hc]*")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--seed", type=int, default=0, help="of the order")
    parser.add_argument("--restart", action="store_true", help="begin at the first case again")
    parser.add_argument("--out", type=Path, default=TARGET)
    options = parser.parse_args()
    cases = product()
    random.Random(options.seed).shuffle(cases)
    conditions = {
        "seed": options.seed,
        "cases": len(cases),
        "steps": STEPS,
        "kernels": kernels(),
        "instruction_sets": cpu.instruction_sets(),
        "torch": torch.__version__,
    }
    done = 0
    if options.out.exists() and not options.restart:
        last = json.loads(options.out.read_text())
        done = last["equal"] if {key: last[key] for key in conditions} == conditions else 0
    begin = time.monotonic()
    while done < len(cases) and time.monotonic() - begin < 60 * options.minutes:
        batch = cases[done : done + BATCH]
        check(batch, done)
        done += len(batch)
        options.out.write_text(json.dumps({**conditions, "equal": done}, indent=2) + "\n")
        print(f"{done} of {len(cases)} cases equal to the bit", end="\r", flush=True)
    print()


if __name__ == "__main__":
    main()
