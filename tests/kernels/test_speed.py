"""No speed without parity: the benchmark compares every pair with the reference before it measures one."""

from __future__ import annotations

import json

import pytest

from benchmarks import cpu_step
from stquant.kernels import cpu

pytestmark = pytest.mark.skipif(cpu.REASON is not None, reason="the compiled kernels are not installed")


@pytest.fixture(autouse=True)
def _restore():
    yield
    cpu.use("")


def test_no_speed_is_printed_if_parity_fails(monkeypatch, tmp_path, capsys) -> None:
    true_step = cpu.adam_step_

    def wrong_step(items, rule) -> None:
        true_step(items, rule)
        items[0].param.view(-1)[0] += 1.0

    monkeypatch.setattr(cpu, "adam_step_", wrong_step)
    monkeypatch.setattr(
        "sys.argv", ["cpu_step.py", "--out", str(tmp_path / "speed.json"), "--isa", cpu.instruction_set()]
    )
    with pytest.raises(AssertionError, match="param differs"):
        cpu_step.main()
    assert not list(tmp_path.iterdir())
    assert "ns" not in capsys.readouterr().out


def test_parity_of_what_is_measured() -> None:
    cpu_step.check_parity(cpu.instruction_sets())


def test_a_record_keeps_other_machines_and_replaces_its_own_tables(tmp_path) -> None:
    path = tmp_path / "speed.json"
    first, second = {"processor": "one", "torch": "2.8"}, {"processor": "two", "torch": "2.8"}
    large, gpt2 = ({"model": name, "contenders": "ours", "threads": 1, "rows": [0]} for name in ("large", "gpt2"))
    for conditions, table in ((first, large), (second, large), (first, gpt2), (first, {**large, "rows": [1]})):
        cpu_step.write(path, conditions, table)
    by_name = {record["conditions"]["processor"]: record["tables"] for record in _machines(path)}
    assert by_name == {"two": [large], "one": [gpt2, {**large, "rows": [1]}]}
    cpu_step.write(path, {**first, "torch": "2.9"}, gpt2)
    assert [record["tables"] for record in _machines(path)] == [[large], [gpt2]]


def _machines(path) -> list[dict]:
    return json.loads(path.read_text())["machines"]
