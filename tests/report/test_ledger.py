"""The ledger against what the storages hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import stquant
from stquant.report.memory import held_bytes, state_bytes, tensors_of
from tests.optim.helpers import POLICIES, gradients, parameters, run


def walk(value: Any, seen: dict[int, int]) -> None:
    """Find storages by brute force: every tensor anywhere below a live state."""
    if isinstance(value, torch.Tensor):
        seen[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
    elif isinstance(value, dict):
        for part in value.values():
            walk(part, seen)
    elif hasattr(value, "__slots__"):
        for slot in value.__slots__:
            walk(getattr(value, slot), seen)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
def test_bytes_are_what_the_storages_hold(policy: Any, dtype: torch.dtype) -> None:
    params = parameters(dtype=dtype)
    optimizer = stquant.AdamW(params, policy=policy)
    run(optimizer, params, gradients(params, 2))
    storages: dict[int, int] = {}
    for state in optimizer.state.values():
        walk(state, storages)
    assert optimizer.ledger().bytes == sum(storages.values()) == state_bytes(optimizer)


def test_a_view_counts_as_the_storage_behind_it_and_once() -> None:
    large = torch.zeros(1000)
    assert held_bytes([large[:10], large[5:]]) == 4000
    assert held_bytes(tensors_of({"a": {"c": large[:1]}, "b": large})) == 4000


def test_rows_and_totals() -> None:
    model = torch.nn.Linear(128, 64)
    policy = stquant.Fixed(exp_avg="dynamic2", exp_avg_sq="log1")
    optimizer = stquant.AdamW(model.named_parameters(), policy=policy)
    assert str(optimizer.ledger()) == "no state yet: call step() or init_state()"
    optimizer.init_state()
    ledger = optimizer.ledger()
    rows = {(row.parameter, row.state): row for row in ledger.rows}
    assert rows["weight", "exp_avg"].format == "dynamic2"
    assert rows["weight", "exp_avg"].bits == 2.25
    assert rows["weight", "exp_avg_sq"].bits == 1.25
    assert rows["bias", "exp_avg"].reason == "1-D"
    assert rows["bias", "exp_avg"].bits == 32.0
    packed, plain, steps = 64 * 128 * (2.25 + 1.25) / 8, 64 * 2 * 4, 2 * 4
    assert ledger.bytes == packed + plain + steps
    assert ledger.parameters == 64 * 128 + 64
    assert ledger.bits == 8 * (packed + plain) / (2 * ledger.parameters)
    assert ledger.bytes_per_parameter == ledger.bytes / ledger.parameters
    data = ledger.to_dict()
    assert data["bytes"] == ledger.bytes
    assert len(data["rows"]) == len(ledger.rows)


def test_the_report_names_everything() -> None:
    model = torch.nn.Linear(128, 64, dtype=torch.bfloat16)
    optimizer = stquant.AdamW(model.named_parameters())
    optimizer.init_state()
    text = str(optimizer.ledger())
    for part in ("weight", "64x128", "dynamic2", "2.250", "1-D", "residual8", "bytes of them residuals"):
        assert part in text
    assert "fp32 " in str(optimizer.ledger())
    assert max(map(len, text.splitlines())) <= 160


def test_parameters_without_names_are_named_by_place() -> None:
    params = parameters([(64, 128), (40, 160)])
    optimizer = stquant.AdamW([{"params": params[:1]}, {"params": params[1:], "policy": "fp32"}])
    optimizer.init_state()
    rows = [row for row in optimizer.ledger().rows if row.state == "exp_avg"]
    assert [(row.parameter, row.format, row.reason) for row in rows] == [
        ("group 0 / 0", "dynamic2", ""),
        ("group 1 / 0", "fp32", "policy"),
    ]
