"""Checkpoints of torch, bitsandbytes and torchao to ours and back; layouts written by hand here."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import stquant
from stquant.checkpoint import convert
from stquant.cli.main import app
from stquant.codecs import catalog, recipes
from stquant.storage.packed import PackedState
from tests.optim.helpers import gradients, parameters, run, same, snapshot

SHAPES = [(64, 256), (40, 160), (130,), ()]


def trained(make: Any, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Any, list[torch.nn.Parameter]]:
    params = parameters(SHAPES, dtype)
    optimizer = make([(f"layer{i}.weight", p) for i, p in enumerate(params)], lr=1e-2, **options)
    run(optimizer, params, gradients(params, 3))
    return optimizer, params


def bitsandbytes_file(wrapped: bool = True) -> dict[str, Any]:
    """A file as bitsandbytes' AdamW8bit writes it: flat blocks of 256, fp32 below 4,096 elements."""
    states = {}
    for index, shape in enumerate(SHAPES[:3]):
        parts: dict[str, Any] = {}
        for number, name in ((1, "dynamic8"), (2, "udynamic8")):
            values = torch.randn(shape) if number == 1 else torch.rand(shape)
            parts[f"state{number}"] = values
            if values.numel() >= 4096:
                flat = PackedState.encoded(catalog.get(name), values.reshape(1, -1), 256)
                parts[f"state{number}"] = flat.unpack().reshape(shape)
                parts[f"absmax{number}"] = flat.scales.flatten().clone()
                parts[f"qmap{number}"] = recipes.table(catalog.get(name)).clone()
        states[index] = {"step": 7, **({"__bnb_optimizer_quant_state__": parts} if wrapped else parts)}
    group = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
    group |= {"alpha": 0.0, "t_alpha": None, "t_beta3": None, "params": [0, 1, 2]}
    return {"state": states, "param_groups": [group]}


@pytest.mark.parametrize("policy", ["fp32", stquant.Fixed(4), "bnb8", "flash8", "solo42"], ids=str)
def test_a_torch_file_converts_to_what_loading_it_gives(policy: Any) -> None:
    theirs, params = trained(torch.optim.AdamW)
    loaded, converted = (stquant.AdamW(params, policy=policy) for _ in range(2))
    loaded.load_state_dict(theirs.state_dict())
    loaded.load_state_dict(loaded.state_dict())  # brings the keys into the order of a file
    converted.load_state_dict(convert.to_stquant(theirs.state_dict(), policy))
    assert same(snapshot(loaded, params), snapshot(converted, params))
    assert converted.param_groups[0]["lr"] == 1e-2


def test_fp32_goes_to_ours_and_back_unchanged() -> None:
    theirs, _ = trained(torch.optim.AdamW, fused=True)
    file = theirs.state_dict()
    back = convert.to_torch(convert.to_stquant(file, "fp32"))
    for index, state in file["state"].items():
        for key, value in state.items():
            assert torch.equal(back["state"][index][key], value)
    torch.optim.AdamW(parameters(SHAPES)).load_state_dict(back)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_ours_converts_to_what_it_exports(dtype: torch.dtype) -> None:
    ours, _ = trained(stquant.AdamW, dtype)
    exported, converted = ours.export_state_dict(), convert.to_torch(ours.state_dict())
    assert exported["state"].keys() == converted["state"].keys()
    for index, state in exported["state"].items():
        assert state.keys() == converted["state"][index].keys()
        assert all(torch.equal(value, converted["state"][index][key]) for key, value in state.items())
    torch.optim.AdamW(parameters(SHAPES, dtype)).load_state_dict(converted)


def test_amsgrad_needs_fp32() -> None:
    theirs, params = trained(torch.optim.AdamW, amsgrad=True)
    file = convert.to_stquant(theirs.state_dict(), "fp32")
    stquant.AdamW(params, amsgrad=True, policy="fp32").load_state_dict(file)
    with pytest.raises(stquant.CheckpointError, match=r"layer0.weight.*amsgrad, which needs policy 'fp32'"):
        convert.to_stquant(theirs.state_dict(), "bnb8")


@pytest.mark.parametrize("wrapped", [True, False])
def test_codes_of_bitsandbytes_carry_over_where_blocks_coincide(wrapped: bool) -> None:
    file = bitsandbytes_file(wrapped)
    before = copy.deepcopy(file)
    ours = convert.to_stquant(file, "bnb8")
    plain = convert.to_torch(file)["state"]
    parts = file["state"][0].get("__bnb_optimizer_quant_state__", file["state"][0])
    assert torch.equal(ours["state"][0]["exp_avg"]["codes"], parts["state1"])
    assert torch.equal(ours["state"][0]["exp_avg_sq"]["scales"].flatten(), parts["absmax2"])
    assert str(file) == str(before)
    params = parameters(SHAPES[:3])
    optimizer = stquant.AdamW(params)
    optimizer.load_state_dict(ours)
    for index, p in enumerate(params):
        assert float(optimizer.state[p]["step"]) == 7
        for key in ("exp_avg", "exp_avg_sq"):
            live = optimizer.state[p][key]
            decoded = live if isinstance(live, torch.Tensor) else live.decode()
            # Rows of 160 are no whole blocks of 256: encoded once more, a hundredth of the block's largest.
            tolerance = 0.02 * float(plain[index][key].abs().max()) if index == 1 else 0.0
            torch.testing.assert_close(decoded, plain[index][key], rtol=0, atol=tolerance)


def _state(file: dict[str, Any]) -> dict[str, Any]:
    return file["state"][1]["__bnb_optimizer_quant_state__"]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: _state(f).pop("state2"), "parameter 'group 0 / 1' has no 'state2' of bitsandbytes"),
        (lambda f: _state(f).pop("absmax1"), "'group 0 / 1': block maxima of exp_avg are NoneType"),
        (lambda f: _state(f).update(absmax1=torch.ones(3)), r"exp_avg are \(3,\), expected shape \(25,\)"),
        (lambda f: _state(f).update(qmap2=torch.ones(9)), "'group 0 / 1': exp_avg_sq has no table"),
        (lambda f: _state(f).update(unorm_vec=torch.ones(1)), "'group 0 / 1' has unorm_vec"),
        (lambda f: f["state"].update({9: f["state"][0]}), "states .'9'. of no parameter"),
        (lambda f: f["param_groups"][0].update(alpha=5.0), "AdEMAMix"),
        (lambda f: f.pop("state"), "not the state dict of an optimizer"),
    ],
)
def test_malformed_files_name_the_parameter(spoil: Any, message: str) -> None:
    file = bitsandbytes_file()
    spoil(file)
    with pytest.raises(stquant.CheckpointError, match=message):
        convert.to_stquant(file, "bnb8")


def test_other_optimizers_are_refused() -> None:
    theirs, _ = trained(torch.optim.SGD, momentum=0.9)
    with pytest.raises(stquant.CheckpointError, match=r"'layer0.weight' has no exp_avg and no exp_avg_sq"):
        convert.to_stquant(theirs.state_dict(), "bnb8")
    ours, _ = trained(stquant.AdamW)
    with pytest.raises(stquant.CheckpointError, match="stquant already"):
        convert.to_stquant(ours.state_dict(), "bnb8")


def test_a_model_beside_it_names_and_checks_shapes() -> None:
    file = bitsandbytes_file()
    model = {name: torch.zeros(shape) for name, shape in zip("abc", SHAPES, strict=False)}
    shapes = convert.shapes_of({**model, "tied": model["a"], "steps": torch.tensor(3)})
    assert list(shapes) == ["a", "b", "c"]
    convert.to_stquant(file, "bnb8", shapes=shapes)
    with pytest.raises(stquant.CheckpointError, match=r"parameter 'b' has states of shape \(40, 160\), .* \(40, 161\)"):
        convert.to_stquant(file, "bnb8", shapes={**shapes, "b": (40, 161)})
    with pytest.raises(stquant.CheckpointError, match="2 floating tensors, the optimizer 3 parameters"):
        convert.to_stquant(file, "bnb8", shapes={"a": (64, 256), "b": (40, 160)})


def command(*args: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["convert", *map(str, args)])
    assert result.exit_code == code, result.output
    return result.output


def test_the_command_converts_there_and_back(tmp_path: Path) -> None:
    theirs, _ = trained(torch.optim.AdamW)
    torch.save({"step": 3, "train": {"optimizer": theirs.state_dict()}}, tmp_path / "a.pt")
    summary = json.loads(
        command(tmp_path / "a.pt", tmp_path / "b.pt", "--entry", "train.optimizer", "--policy", "torchao4", "--json")
    )
    assert (summary["from"], summary["to"], summary["states"]) == ("torch", "stquant", 4)
    stquant.AdamW(parameters(SHAPES)).load_state_dict(torch.load(tmp_path / "b.pt"))
    assert "stquant to torch: states of 4 of 4" in command(tmp_path / "b.pt", tmp_path / "c.pt", "--to", "torch")
    torch.optim.AdamW(parameters(SHAPES)).load_state_dict(torch.load(tmp_path / "c.pt"))


def test_misuse_exits_with_two_and_writes_nothing(tmp_path: Path) -> None:
    theirs, _ = trained(torch.optim.AdamW)
    good, bad, new = tmp_path / "good.pt", tmp_path / "bad.pt", tmp_path / "new.pt"
    torch.save(theirs.state_dict(), good)
    bad.write_bytes(b"no checkpoint")
    objects = tmp_path / "objects.pt"
    torch.save({"state": Path("x")}, objects)
    for args in (
        (good, new, "--policy", "int4"),
        (good, new, "--entry", "optimizer"),
        (good, new, "--to", "jax"),
        (good, new, "--model", good),
        (good, good),
        (bad, new),
        (objects, new),
        (tmp_path / "nowhere.pt", new),
    ):
        command(*args, code=2)
        assert not new.exists()
    assert not list(tmp_path.glob("*.partial"))
    assert same([torch.load(good)["state"][0]["exp_avg"]], [theirs.state_dict()["state"][0]["exp_avg"]])
