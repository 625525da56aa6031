"""Who serves, and how one is told."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings

import pytest
import torch

import stquant
from stquant.errors import BackendError
from stquant.kernels import backend, cpu

compiled = pytest.mark.skipif(cpu.REASON is not None, reason="the compiled kernels are not installed")


def test_unknown_name_raises() -> None:
    with pytest.raises(BackendError, match="use None or one of"):
        backend.resolve("gpu")


@compiled
def test_the_compiled_kernels_are_the_default() -> None:
    assert backend.resolve(None).name == "cpu"
    assert [(e.name, e.default) for e in backend.explain()] == [("triton", False), ("cpu", True), ("reference", False)]


def test_without_the_module_the_reference_serves_and_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "REASON", "the compiled module is missing; install with a C++17 compiler: pip install .")
    monkeypatch.setattr(backend, "_warned", False)
    assert backend.resolve(None).name == "reference"
    with pytest.raises(BackendError, match="pip install"):
        backend.resolve("cpu")
    explained = {e.name: e for e in backend.explain()}
    assert not explained["cpu"].available
    assert explained["reference"].default
    parameter = torch.nn.Parameter(torch.zeros(3))
    with pytest.warns(RuntimeWarning, match="compiled module is missing"):
        stquant.AdamW([parameter])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stquant.AdamW([parameter])


def in_fresh_process(code: str, isa: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "STQUANT_CPU_ISA": isa}, capture_output=True, text=True
    )


@compiled
def test_the_environment_forces_an_instruction_set() -> None:
    code = "from stquant.kernels import cpu; print(cpu.instruction_set())"
    assert in_fresh_process(code, "scalar").stdout.strip() == "scalar"


@compiled
def test_an_unavailable_instruction_set_raises() -> None:
    code = "import torch, stquant; stquant.AdamW([torch.nn.Parameter(torch.zeros(3))])"
    result = in_fresh_process(code, "sparc")
    assert "BackendError" in result.stderr
    assert "'sparc' is not available; this machine has" in result.stderr
