"""Parameters, codes and scales do not depend on how parameters are spread over ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from tests.distributed.layouts import OPTIMIZERS, SIZES, differences, trained
from tests.distributed.ranks import Ranks

STEPS = 4


@functools.cache
def in_one_process(which: str) -> dict[str, Any]:
    return trained("single", which, STEPS)


def differing(layout: str, truth: dict[str, dict[str, Any]]) -> dict[str, list[str]]:
    """Train with every optimizer in a layout and return what differs from one process."""
    found = {which: differences(trained(layout, which, STEPS), expected) for which, expected in truth.items()}
    return {which: wrong for which, wrong in found.items() if wrong}


@pytest.mark.parametrize("layout", [layout for layout in SIZES if layout != "single"])
def test_every_layout_equals_one_process(ranks: Callable[[int], Ranks], layout: str) -> None:
    truth = {which: in_one_process(which) for which in OPTIMIZERS}
    assert ranks(SIZES[layout])(differing, layout, truth) == [{}] * SIZES[layout]
