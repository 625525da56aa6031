"""Triton's interpreter, fast enough for tests."""

from __future__ import annotations

import pytest
from triton.runtime import interpreter

from stquant.kernels.triton import launch


def quicken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter, whose time goes by programs rather than elements, run one for each parameter."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(launch, "CHUNK", 4096)
    monkeypatch.setattr(launch, "RAGGED_CHUNK", 4096)
    # It prepares `triton.language` anew for each device function; once is enough.
    monkeypatch.setattr(
        interpreter.InterpretedFunction, "__call__", lambda self, *args, **kw: self.rewrite()(*args, **kw)
    )
