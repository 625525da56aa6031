"""The process that forks runs; it lives as long as the session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integrations.forks import Forks


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    started = Forks()
    yield started
    started.close()
