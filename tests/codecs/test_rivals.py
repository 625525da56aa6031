"""Published recipes against the packages that ship them; needs `pip install 'stquant[rivals]'`.

Not compared here: FlashOptim's kernels run on CUDA only, and SOLO's package does not import beside
current versions of torchao; `test_recipes` holds those two to their formulae.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import stquant
from stquant.checkpoint import convert, foreign
from stquant.codecs import catalog, recipes
from stquant.storage.packed import PackedState
from tests.optim.helpers import gradients, parameters, run
from tests.tolerances import ULP

pytestmark = pytest.mark.filterwarnings("ignore")
SHAPES = [(64, 256), (40, 160), (130,)]
TREES = {"dynamic8": (True, 7, 8), "udynamic8": (False, 7, 8), "dynamic4": (True, 3, 4)}


def package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except (ImportError, OSError, RuntimeError) as error:
        pytest.skip(f"{name} cannot be imported here: {error}")


def sample(name: str, rows: int = 64, row: int = 1024) -> torch.Tensor:
    values = torch.randn(rows, row) * torch.exp(2 * torch.randn(rows, row))
    return values if catalog.get(name).signed else values.square()


@pytest.mark.parametrize("name", ["dynamic8", "udynamic8", "dynamic4", "linear4"])
def test_torchao_stores_and_decodes_the_same_bits(name: str) -> None:
    theirs = package("torchao.optim.quant_utils")
    format, values = catalog.get(name), sample(name)
    table = recipes.table(format)
    scaled, scale = theirs.scale_tensor(values, format.block)
    quantize = theirs.quantize_8bit_with_qmap if format.bits == 8 else theirs.quantize_4bit_with_qmap
    codes = quantize(scaled.flatten(), table).view(values.shape)
    ours = PackedState.encoded(format, values, format.block)
    assert torch.equal(ours.scales.flatten(), scale)
    assert torch.equal(ours.unpack(), codes)
    assert torch.equal(ours.decode(), theirs.dequant_with_qmap(codes, table, scale))


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("where", ["torchao.optim.quant_utils", "bitsandbytes.functional"])
def test_trees_are_those_of_the_packages_up_to_their_vector_units(where: str, name: str) -> None:
    """fp32 `linspace` rounds differently with every vector width: two units in the last place."""
    if where.startswith("bits") and name == "dynamic4":
        pytest.skip("bitsandbytes pads 4-bit maps to 256 entries")
    theirs = torch.as_tensor(package(where).create_dynamic_map(*TREES[name]), dtype=torch.float32)
    torch.testing.assert_close(recipes.table(catalog.get(name)), theirs, rtol=2 * ULP, atol=0)


def test_without_vector_units_trees_are_equal_to_the_bit() -> None:
    package("torchao.optim.quant_utils")
    script = (
        "import torch\n"
        "from torchao.optim.quant_utils import create_dynamic_map as tree\n"
        "from stquant.codecs import catalog, recipes\n"
        f"for name, args in {TREES}.items():\n"
        "    assert torch.equal(recipes.table(catalog.get(name)), torch.tensor(tree(*args))), name\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, env={**os.environ, "ATEN_CPU_CAPABILITY": "default"})


@pytest.mark.parametrize("name", ["dynamic8", "udynamic8"])
def test_bitsandbytes_decodes_the_same_bits_and_encodes_within_its_lookup_on_cpus(name: str) -> None:
    """Its CPU encoder looks codes up in 2**16 even buckets of [-1, 1]; the best code is up to one off."""
    theirs = package("bitsandbytes.functional")
    format, values = catalog.get(name), sample(name)
    table = recipes.table(format)
    codes, state = theirs.quantize_blockwise(values, code=table, blocksize=256)
    ours = PackedState.encoded(format, values, 256)
    assert torch.equal(ours.scales.flatten(), state.absmax)
    scale = ours.scales.repeat_interleave(256, 1)
    excess = (table[codes.int()] - values / scale).abs() - (table[ours.unpack().int()] - values / scale).abs()
    assert float(excess.max()) <= 2 / 65535
    decoded = theirs.dequantize_blockwise(ours.unpack(), absmax=state.absmax, code=table, blocksize=256)
    assert torch.equal(ours.decode(), decoded)


@pytest.mark.parametrize("name", ["dynamic8", "udynamic8"])
def test_bitsandbytes_without_its_lookup_differs_only_on_middles(name: str) -> None:
    """Its portable encoder multiplies by the reciprocal of the scale and rounds a middle down."""
    package("bitsandbytes.functional")
    format, values = catalog.get(name), sample(name)
    table = recipes.table(format)
    portable = torch._C.DispatchKeySet(torch._C.DispatchKey.CompositeExplicitAutograd)
    codes, scale = torch.ops.bitsandbytes.quantize_blockwise.default.redispatch(portable, values, table, 256)
    ours = PackedState.encoded(format, values, 256)
    assert torch.equal(ours.scales.flatten(), scale.flatten())
    differs = ours.unpack() != codes
    assert float(differs.float().mean()) < 1e-4
    low = torch.minimum(ours.unpack(), codes)[differs].int()
    ratio = (values / ours.scales.repeat_interleave(256, 1))[differs]
    middle = (table[low] + table[low + 1]) / 2
    assert bool(((ratio - middle).abs() <= 2 * ULP * ratio.abs()).all())


def test_nf4_is_that_of_bitsandbytes() -> None:
    theirs = package("bitsandbytes.functional").get_4bit_type("nf4", device="cpu")
    assert torch.equal(recipes.table(catalog.get("nf4")), theirs)


def trained(optimizer: torch.optim.Optimizer, params: list[torch.nn.Parameter], steps: int = 3) -> dict[str, Any]:
    run(optimizer, params, gradients(params, steps))
    return optimizer.state_dict()


def test_files_of_bitsandbytes_convert(tmp_path: Path) -> None:
    theirs, params = package("bitsandbytes.optim"), parameters(SHAPES)
    file = trained(theirs.AdamW8bit(params, lr=1e-2), params)
    torch.save(file, tmp_path / "a.pt")
    ours = convert.to_stquant(foreign.load(tmp_path / "a.pt"), "bnb8")
    parts = file["state"][0]["__bnb_optimizer_quant_state__"]
    assert torch.equal(ours["state"][0]["exp_avg"]["codes"], parts["state1"])
    assert torch.equal(ours["state"][0]["exp_avg"]["scales"].flatten(), parts["absmax1"])
    optimizer = stquant.AdamW(params)
    optimizer.load_state_dict(ours)
    run(optimizer, params, gradients(params, 1))


@pytest.mark.parametrize(("kind", "policy"), [("AdamW8bit", "bnb8"), ("AdamW4bit", "torchao4"), ("AdamWFp8", "fp32")])
def test_files_of_torchao_convert(kind: str, policy: str, tmp_path: Path) -> None:
    theirs, params = package("torchao.optim"), parameters(SHAPES)
    with torch.compiler.set_stance("force_eager"):
        file = trained(getattr(theirs, kind)(params, lr=1e-2), params)
    torch.save(file, tmp_path / "a.pt")
    saved = foreign.load(tmp_path / "a.pt")
    assert convert.kind_of(saved) == "torchao"
    plain = convert.to_torch(saved)
    for index, state in file["state"].items():
        for key in ("exp_avg", "exp_avg_sq"):
            value = state[key]
            expected = value.dequantize() if hasattr(value, "dequantize") and hasattr(value, "codes") else value
            assert torch.equal(plain["state"][index][key], expected.float())
    ours = convert.to_stquant(saved, policy)
    if policy != "fp32":
        assert torch.equal(ours["state"][0]["exp_avg"]["scales"].flatten(), file["state"][0]["exp_avg"].scale)
    optimizer = stquant.AdamW(params)
    optimizer.load_state_dict(ours)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-2)
    if policy == "torchao4":  # this table has the same bits everywhere
        assert torch.equal(optimizer.state[params[0]]["exp_avg"].decode(), plain["state"][0]["exp_avg"])


def test_a_first_step_stores_what_torchao_stores() -> None:
    """From the second step on weights and averages differ in the last place: torchao's `lerp` fuses."""
    theirs, params = package("torchao.optim"), parameters([(64, 256)])
    with torch.compiler.set_stance("force_eager"):
        file = trained(theirs.AdamW4bit(params, lr=1e-2), params, 1)
    ours = stquant.AdamW(params, lr=1e-2, policy="torchao4")
    run(ours, params, gradients(params, 1))
    for key in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(ours.state[params[0]][key].decode(), file["state"][0][key].dequantize())
