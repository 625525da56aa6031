"""Process groups that live as long as the session."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.distributed.ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """Return the processes of a number of ranks; they start when first asked for."""
    started: dict[int, Ranks] = {}

    def of(size: int) -> Ranks:
        if size not in started or not all(process.is_alive() for process in started[size].processes):
            started[size] = Ranks(size)
        return started[size]

    yield of
    for group in started.values():
        group.close()
