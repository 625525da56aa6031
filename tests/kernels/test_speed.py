"""No speed without parity: the benchmark compares every pair with the reference before it measures one."""

from __future__ import annotations

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
