"""Kernels compile ahead of time for GPUs that are not here, without spills and with wide loads."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton")
variants = pytest.importorskip("stquant.kernels.triton.variants")

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "triton_compile.py"


def test_pairs_of_choices_compile(tmp_path: Path) -> None:
    """The script complains of spills and narrow access; a process of its own, as this one interprets."""
    environment = {**os.environ, "TRITON_DEFAULT_FP_FUSION": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, SCRIPT, "--few"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    kernels = [line for line in done.stdout.splitlines() if "Cost(" in line]
    assert len(kernels) == len(variants.pairs(variants.FEW)) + len(variants.others(variants.ARCHITECTURES))
    assert all("spills=0" in line for line in kernels), done.stdout
    assert all(any(architecture in line for line in kernels) for architecture in variants.ARCHITECTURES)


@pytest.mark.parametrize("kinds", [variants.FEW, variants.MANY], ids=["few", "many"])
def test_every_pair_occurs(kinds) -> None:
    """What a job is made of shows in its constants: dtype with format, format with block, rule with architecture."""
    jobs = variants.pairs(kinds)
    firsts, _, weights, blocks, architectures = kinds
    found = {(job["FIRST"], job["FIRST_BITS"], job["PARAM"], job["RESIDUAL_BITS"]) for _, _, job in jobs}
    assert {(f[0], f[1], w[0], w[2]) for f, w in itertools.product(firsts, weights)} == found
    found = {(job["FIRST"], job["FIRST_BITS"], job["BLOCK"], job["WHOLE"]) for _, _, job in jobs}
    assert {(f[0], f[1], *b[:2]) for f, b in itertools.product(firsts, blocks)} == found
    rules = ("adam", "sgd", "lion")
    assert {(a, name) for a, name, _ in jobs} == set(itertools.product(architectures, rules))
    assert len(jobs) < 3 * max(len(a) * len(b) for a, b in itertools.combinations(kinds, 2))


FINE = variants.Cost(registers=96, loads=(38, 4), stores=(12, 2), spills=0, parked=0, instructions=1000)


@pytest.mark.parametrize(
    ("first", "weight", "loads", "stores"),
    [
        *(((2, 2, 1), weight, *most) for weight, *most in (((0, 0, 0, 0), 4, 2), ((0, 1, 0, 0), 3, 2))),
        *(((2, 2, 1), weight, 2, 1) for weight in ((1, 1, 8, 1), (2, 2, 0, 0))),
        ((1, 0, 0), (1, 1, 0, 0), 4, 3),
    ],
    ids=["fp32", "bf16 gradients", "bf16", "fp16", "plain momentum"],
)
def test_each_narrow_access_of_whole_blocks_is_complained_of(first, weight, loads: int, stores: int) -> None:
    """A thread has 8 elements: two wide accesses of each fp32 tensor, one of a 16-bit one."""
    constants = variants.adam(first, (4, 1, 1), weight, (128, 1, 1))
    wide = replace(FINE, loads=(38, loads), stores=(12, stores))
    assert variants.complaint(wide, constants) is None
    assert "128-bit" in str(variants.complaint(replace(wide, loads=(38, loads - 1)), constants))
    assert "128-bit" in str(variants.complaint(replace(wide, stores=(12, stores - 1)), constants))
    assert variants.complaint(replace(wide, spills=3), constants) == "3 spills"
    assert (
        variants.complaint(replace(wide, loads=(38, 0)), variants.adam(first, (4, 1, 1), weight, (128, 0, 1))) is None
    )


def test_parts_of_the_full_product_are_fair() -> None:
    """Each part has all blocks, options and rules in about the same numbers, and no job comes twice."""
    jobs = variants.every(["sm_90"])
    assert len({(name, *job.items()) for _, name, job in jobs}) == len(jobs)
    part = jobs[::100]
    for key in ("BLOCK", "WHOLE", "MAXIMIZE", "FIRST_BITS", "RESIDUAL_BITS"):
        shares = [Counter(job[key] for _, _, job in some) for some in (jobs, part)]
        assert all(abs(shares[1][v] / len(part) - n / len(jobs)) < 0.1 for v, n in shares[0].items())


def test_the_record_is_of_all_architectures_and_without_complaints() -> None:
    record = json.loads((SCRIPT.parent / "results" / "triton_compile.json").read_text())
    for section in ("pairs", "all"):
        assert record[section].keys() == variants.ARCHITECTURES.keys()
        assert all(found["compiled"] > 0 == found["complaints"] for found in record[section].values())
