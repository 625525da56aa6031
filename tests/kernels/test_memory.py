"""A step of the compiled kernels needs next to no memory of its own, however large the parameter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import stquant
from stquant.kernels import cpu

LIMIT = 8 << 20
"""Bytes that the resident set may grow by during a step."""

RESET_PEAK = Path("/proc/self/clear_refs")


def resident(key: str) -> int:
    """Return `VmRSS` or `VmHWM`, the resident set now and at its peak, in bytes."""
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[key].split()[0]) << 10


@pytest.mark.skipif(cpu.REASON is not None, reason="the compiled kernels are not installed")
@pytest.mark.skipif(not RESET_PEAK.exists(), reason="needs Linux to measure the peak of the resident set")
def test_a_step_on_100_million_elements_needs_less_than_8_megabytes() -> None:
    parameter = torch.nn.Parameter(torch.ones(100_000, 1000))
    parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer = stquant.AdamW([parameter])
    optimizer.step()
    RESET_PEAK.write_text("5")
    before = resident("VmRSS")
    optimizer.step()
    assert resident("VmHWM") - before < LIMIT
