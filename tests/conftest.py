"""Fixtures that many tests share."""

from __future__ import annotations

import contextlib
import os

import pytest
import torch
from hypothesis import HealthCheck, settings

# Triton decides at import between its compiler and its interpreter, which works on CPU tensors.
_asked = os.environ.get("TRITON_INTERPRET")
os.environ["TRITON_INTERPRET"] = "1"
with contextlib.suppress(ImportError):
    import stquant.kernels.triton.launch  # noqa: F401
if _asked is None:
    del os.environ["TRITON_INTERPRET"]

for profile, examples in {"default": 30, "long": 10_000}.items():
    settings.register_profile(
        profile,
        deadline=None,
        derandomize=True,
        max_examples=examples,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
settings.load_profile("default")


if "PYTEST_XDIST_WORKER" in os.environ:
    # One process per core already; more threads would only wait for each other.
    torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--overwrite", action="store_true", help="write golden files anew")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
