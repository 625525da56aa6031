"""What is found in checkpoints against the optimizers that wrote them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stquant
from stquant.cli.files import read_optimizer
from stquant.errors import CheckpointError
from stquant.report.inspection import inspect
from stquant.report.ledger import Row
from tests.checkpoint.test_convert import bitsandbytes_file
from tests.optim.helpers import gradients, parameters, run

SHAPES = [(64, 256), (40, 160), (130,), ()]
OURS = {
    "default": lambda params: stquant.AdamW(params),
    "bf16": lambda params: stquant.AdamW(params, policy="flash8", master_bits=5),
    "solo42": lambda params: stquant.AdamW(params, policy="solo42"),
    "amsgrad": lambda params: stquant.AdamW(params, policy="fp32", amsgrad=True),
    "adaptive": lambda params: stquant.AdamW(params, policy=stquant.Budget(bits=3.0, every=2)),
    "sgd": lambda params: stquant.SGD(params, momentum=0.9),
    "lion": lambda params: stquant.Lion(params),
}


def trained(name: str, steps: int = 3) -> Any:
    params = parameters(SHAPES, torch.bfloat16 if name == "bf16" else torch.float32)
    optimizer = OURS[name]([(f"layer{i}.weight", p) for i, p in enumerate(params)])
    run(optimizer, params, gradients(params, steps))
    return optimizer


def by_name(rows: Any) -> list[Row]:
    return sorted(rows, key=lambda row: (row.parameter, row.state))


@pytest.mark.parametrize("name", OURS)
def test_a_file_of_ours_is_what_the_ledger_said(name: str) -> None:
    optimizer = trained(name)
    found = inspect(optimizer.state_dict())
    assert by_name(found.ledger.rows) == by_name(optimizer.ledger().rows)
    assert (found.kind, found.steps, found.stateless, found.findings) == ("stquant", (3, 3), 0, [])
    assert found.groups[0]["policy"] == repr(optimizer._policy(optimizer.param_groups[0]))
    assert sum(kind["bytes"] for kind in found.kinds()) == optimizer.ledger().bytes


@pytest.mark.parametrize("name", OURS)
def test_the_packed_form_is_what_the_ledger_said(name: str, tmp_path: Path) -> None:
    optimizer = trained(name)
    torch.save(optimizer.state_dict(packed=True), tmp_path / "packed.pt")
    found = inspect(read_optimizer(tmp_path / "packed.pt", "")[1])
    assert by_name(found.ledger.rows) == by_name(optimizer.ledger().rows)
    assert (found.steps, found.findings) == ((3, 3), [])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # of the save below, which has one process
@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flattened"])
@pytest.mark.parametrize("where", ["optim", ""])
def test_a_folder_is_what_the_ledger_said(flat: bool, where: str, tmp_path: Path) -> None:
    from torch.distributed.checkpoint import save
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

    model = nn.Sequential(nn.Linear(128, 64), nn.Linear(64, 3)).bfloat16()
    optimizer = stquant.AdamW(model.named_parameters())
    model(torch.ones(2, 128, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    taken = get_optimizer_state_dict(model, optimizer, options=options)
    save({where: taken} if where else taken, checkpoint_id=tmp_path, no_dist=True)
    place, saved = read_optimizer(tmp_path, "")
    found = inspect(saved)
    assert place == where
    assert by_name(found.ledger.rows) == by_name(optimizer.ledger().rows)
    assert (found.steps, found.findings) == ((1, 1), [])


@pytest.mark.parametrize("make", [stquant.AdamW, torch.optim.AdamW], ids=["stquant", "torch"])
def test_the_flattened_form_is_the_nested_one(make: Any, tmp_path: Path) -> None:
    """Names that begin with others, and groups that differ."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

    model = nn.ModuleDict({"a": _Named()})
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = make([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=0.25)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    found = []
    for flat in (False, True):
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        torch.save(get_optimizer_state_dict(model, optimizer, options=options), tmp_path / "file.pt")
        found.append(inspect(read_optimizer(tmp_path / "file.pt", "")[1]))
    assert by_name(found[0].ledger.rows) == by_name(found[1].ledger.rows)
    assert {str(group) for group in found[0].groups} == {str(group) for group in found[1].groups}
    assert found[0].findings == found[1].findings == []
    assert found[0].kind == found[1].kind


class _Named(nn.Module):
    """A parameter whose name begins with that of another."""

    def __init__(self) -> None:
        super().__init__()
        self.exp = nn.Linear(64, 96)
        self.weight = nn.Parameter(torch.ones(64, 96))
        self.exp_avg = nn.Parameter(torch.ones(64))


def test_a_file_of_torch() -> None:
    params = parameters(SHAPES)
    params[1].requires_grad_(False)
    optimizer = torch.optim.AdamW(params, lr=0.25)
    run(optimizer, [params[0], *params[2:]], gradients([params[0], *params[2:]], 2))
    found = inspect(optimizer.state_dict())
    assert (found.kind, found.steps, found.stateless) == ("torch", (2, 2), 1)
    assert found.groups == [{"parameters": 4, "lr": 0.25}]
    assert found.ledger.bytes == sum(8 * p.numel() + 4 for p in (params[0], *params[2:]))


def test_a_file_of_bitsandbytes_counts_codes_and_scales() -> None:
    found = inspect(bitsandbytes_file())
    assert found.kind == "bitsandbytes"
    packed = [64 * 256, 40 * 160]
    assert found.ledger.bytes == sum(2 * (n + 4 * n // 256) for n in packed) + 2 * 4 * 130
    assert {row.format for row in found.ledger.rows} == {"8 bits, block 256", "fp32"}


@pytest.mark.parametrize("bits", [8, 4])
def test_a_file_of_torchao_counts_codes_and_scales(bits: int) -> None:
    """A stand-in has what torchao's tensor classes keep: two 4-bit codes a byte, scales of flat blocks."""
    shape, block = (64, 256), {8: 256, 4: 128}[bits]
    codes = torch.zeros(shape if bits == 8 else 64 * 256 // 2, dtype=torch.uint8)
    parts = {"shape": shape, "codes": codes, "scale": torch.ones(64 * 256 // block), "block_size": block}
    theirs = type("OptimState", (), {"__module__": "torchao.optim", **parts, "qmap": torch.linspace(-1, 1, 2**bits)})
    state = {"step": torch.tensor(5.0), "exp_avg": theirs(), "exp_avg_sq": theirs()}
    found = inspect({"state": {0: state}, "param_groups": [{"lr": 0.1, "params": [0]}]})
    assert (found.kind, found.steps, found.findings) == ("torchao", (5, 5), [])
    rows = [row for row in found.ledger.rows if row.state != "step"]
    assert {(row.format, row.shape) for row in rows} == {(f"{bits} bits, block {block}", shape)}
    assert sum(row.bytes for row in rows) == 2 * (64 * 256 * bits // 8 + 4 * 64 * 256 // block)


def damaged(change: Any) -> dict[str, Any]:
    saved = trained("default").state_dict()
    change(saved["state"])
    return saved


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s[0]["exp_avg"]["scales"].fill_(float("nan")), "'layer0.weight': exp_avg.scales holds non-finite"),
        (lambda s: s[0]["exp_avg"]["codes"].fill_(9), "'layer0.weight': exp_avg.codes holds more than 2 bits"),
        (lambda s: s[1].pop("step"), "'layer1.weight': state lacks 'step'"),
        (lambda s: s[0]["exp_avg"].pop("block"), "'layer0.weight': exp_avg lacks 'block'"),
        (lambda s: s[0]["exp_avg"].pop("codes"), "'layer0.weight': exp_avg lacks 'codes'"),
        (lambda s: s[0]["exp_avg"].update(format=999), "format number 999 is unknown"),
        (lambda s: s[0].update(exp_avg_sq=torch.zeros(3)), r"states have shapes \[\(3,\), \(64, 256\)\]"),
        (lambda s: s.update({9: s[0]}), r"states \['9'\] belong to no parameter"),
    ],
)
def test_what_would_not_load_is_found(change: Any, message: str) -> None:
    found = inspect(damaged(change))
    assert len(found.findings) == 1
    assert re.search(message, found.findings[0])


def test_where_the_optimizer_is(tmp_path: Path) -> None:
    state = trained("default").state_dict()
    for name, content, found in (
        ("plain", state, ""),
        ("nested", {"model": {}, "optimizer": state}, "optimizer"),
    ):
        torch.save(content, tmp_path / name)
        assert read_optimizer(tmp_path / name, "")[0] == found
    torch.save({"a": state, "b": state}, tmp_path / "two")
    with pytest.raises(CheckpointError, match="several optimizers; choose one with --entry: a, b"):
        read_optimizer(tmp_path / "two", "")
    with pytest.raises(CheckpointError, match=r"without \.metadata"):
        read_optimizer(tmp_path, "")
