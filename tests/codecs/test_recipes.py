"""The arithmetic of published recipes, against formulae; `test_rivals` has the real packages."""

from __future__ import annotations

import hashlib

import pytest
import torch

from stquant.codecs import catalog, curves, recipes
from stquant.codecs.format import Family, Format
from stquant.storage.packed import PackedState
from tests.cases import RECIPES, name
from tests.tolerances import STANDARD_ERRORS, ULP

TABLES = [f for f in RECIPES if f.family in (Family.TREE, Family.UNSIGNED_TREE, Family.LINEAR, Family.NORMAL)]
SOLO = catalog.get("solo2")


def sample(format: Format, rows: int = 32, row: int = 300) -> torch.Tensor:
    values = torch.randn(rows, row) * torch.exp(2 * torch.randn(rows, row))
    return values if format.signed else values.square()


def digest(format: Format) -> str:
    return hashlib.sha256(recipes.table(format).numpy().tobytes()).hexdigest()[:16]


def test_tables_are_pinned() -> None:
    """Checkpoints depend on every bit of them, on every machine."""
    assert {format.name: digest(format) for format in TABLES} == {
        "dynamic8": "dad4c269c3243d17",
        "udynamic8": "9dad1cb84fb69242",
        "dynamic4": "721d11e3711326d4",
        "linear4": "0aeb670b8c9b6b0f",
        "nf4": "8501941daa1b8a90",
    }


@pytest.mark.parametrize("format", [f for f in TABLES if "tree" in f.family.value], ids=name)
def test_trees_follow_the_published_rule(format: Format) -> None:
    expected = [0.0, 1.0]
    for place in range(format.bits - 1):
        cuts = 2 ** (place if format.signed else place + 1)
        for cut in range(cuts):
            level = (0.1 + 0.9 * (cut + 0.5) / cuts) * 10.0 ** (place - format.bits + 2)
            expected += [level, -level] if format.signed else [level]
    table = recipes.table(format)
    assert len(table) == len(expected) == 2**format.bits
    torch.testing.assert_close(table, torch.tensor(sorted(expected)), rtol=2 * ULP, atol=0)


def test_nf4_is_made_of_normal_quantiles() -> None:
    """One side has 8 of them and the other 7, cut at the mean of 1 - 1/30 and 1 - 1/32."""
    outermost = (29 / 30 + 31 / 32) / 2
    positive = torch.special.ndtri(torch.linspace(outermost, 0.5, 9, dtype=torch.float64))[:-1]
    negative = -torch.special.ndtri(torch.linspace(outermost, 0.5, 8, dtype=torch.float64))[:-1]
    expected = torch.cat((negative / positive[0], torch.zeros(1).double(), positive.flip(0) / positive[0])).float()
    torch.testing.assert_close(recipes.table(catalog.get("nf4")), expected, rtol=0, atol=2e-6)


def test_linear_levels_have_no_zero() -> None:
    assert recipes.table(catalog.get("linear4")).tolist() == [(i + 1) / 16 for i in range(16)]


@pytest.mark.parametrize("format", RECIPES, ids=name)
def test_codes_ascend_with_the_value_and_every_level_encodes_to_its_code(format: Format) -> None:
    levels = curves.levels(format)
    produced = torch.arange(len(levels), dtype=torch.int32)[~levels.isnan()]
    levels = levels[produced.long()]
    assert bool((levels.diff() > 0).all())
    for size in (1.0, 3.0, 1e-9, 2.0**60):
        scale = torch.tensor([size, 0.5] if format.family is Family.GEOMETRIC else [size])
        values = recipes.decode(format, produced, scale)
        assert torch.equal(recipes.encode(format, values, scale), produced)


@pytest.mark.parametrize("format", TABLES, ids=name)
def test_the_nearest_level_is_taken_and_a_middle_goes_up(format: Format) -> None:
    table = recipes.table(format)
    ratio = torch.linspace(-1 if format.signed else 0, 1, 4001)
    codes = recipes.encode(format, ratio, torch.ones(1))
    distance = (ratio[:, None] - table).abs()
    nearest = distance.min(1).values
    assert bool((distance.gather(1, codes.long()[:, None])[:, 0] <= nearest + ULP).all())
    middle = torch.tensor([0.0, 1.0]) if format.family is Family.LINEAR else table[-2:]
    expected = [0, 15] if format.family is Family.LINEAR else [len(table) - 2, len(table) - 1]
    assert recipes.encode(format, middle, torch.ones(1)).tolist() == expected
    if format.family is Family.LINEAR:
        assert recipes.encode(format, torch.tensor([3 / 32]), torch.ones(1)).tolist() == [1]


@pytest.mark.parametrize("format", RECIPES, ids=name)
def test_errors_are_those_of_the_spacing(format: Format) -> None:
    values = sample(format)
    state = PackedState.encoded(format, values, format.block)
    decoded = state.decode()
    assert decoded.shape == values.shape
    scales = state.scales.float() if not format.scale_parts else state.scales[..., 0]
    top = scales.repeat_interleave(format.block, 1)[:, : values.shape[1]]
    if format.family is Family.GEOMETRIC:
        base = state.scales[..., 1].repeat_interleave(format.block, 1)[:, : values.shape[1]]
        inside = values >= decoded.min(1, keepdim=True).values
        ratio = (decoded / values).where(inside & (values >= top * base**3), torch.tensor(1.0))
        assert bool((ratio <= base**-0.5 * 1.001).all() and (ratio >= base**0.5 * 0.999).all())
    elif format.family is Family.ROOT:
        error = (decoded.sqrt() - values.sqrt()).abs()
        assert bool((error <= top * (0.5 / 255 + 2.0**-11 + 1e-6)).all())
    else:
        levels = curves.levels(format)
        half_gap = levels[~levels.isnan()].diff().max() / 2
        below = 1.0 + levels[0] if format.signed else levels[0]
        error = (decoded - values).abs()
        allowed = max(float(half_gap), float(below)) + (2.0**-11 if format.scale_dtype is torch.float16 else 1e-6)
        assert bool((error <= top * allowed).all())


@pytest.mark.parametrize("format", RECIPES, ids=name)
def test_blocks_of_zeros_and_non_finite_values(format: Format) -> None:
    values = sample(format, 4, 256)
    values[0] = 0.0
    values[1, 3], values[1, 9], values[2] = float("nan"), float("inf"), 1e-38
    decoded = PackedState.encoded(format, values, format.block).decode()
    assert bool(decoded.isfinite().all())
    assert not bool(decoded[0].any())
    assert not bool(torch.signbit(decoded[0]).any())
    assert not bool(decoded[2].any())
    assert not bool(PackedState.zeros(format, PackedState.encoded(format, values, format.block).grid).decode().any())


def test_softsign_and_root_follow_their_formulae() -> None:
    momentum, squares = torch.tensor([-1.0, -0.3, 0.0, 0.01, 0.5]), torch.tensor([0.0, 1e-6, 0.3, 0.5, 1.0])
    softsign, root = catalog.get("softsign8"), catalog.get("sqrt8")
    codes = recipes.encode(softsign, momentum, torch.ones(1)) - 127
    assert codes.tolist() == [round(127 * 2 * z / (1 + abs(z))) for z in momentum.tolist()]
    back = [q / 127 / (2 - abs(q / 127)) for q in codes.tolist()]
    torch.testing.assert_close(recipes.decode(softsign, codes + 127, torch.ones(1)), torch.tensor(back))
    codes = recipes.encode(root, squares, torch.ones(1))
    assert codes.tolist() == [int(255 * v**0.5 + 0.5) for v in squares.tolist()]
    torch.testing.assert_close(
        recipes.decode(root, codes, torch.tensor([2.0])), torch.tensor([4 * (q / 255) ** 2 for q in codes.tolist()])
    )


@pytest.mark.parametrize("format", [catalog.get("softsign8"), catalog.get("sqrt8")], ids=name)
def test_fp16_scales_are_stored_as_such_and_stay_finite(format: Format) -> None:
    values = sample(format, 4, 64)
    state = PackedState.encoded(format, values, 32)
    assert state.scales.dtype is torch.float16
    assert sum(t.nbytes for t in state.tensors()) == values.numel() * (8 + 16 / 32) / 8
    huge = PackedState.encoded(format, values * 1e12, 32)
    assert bool(huge.decode().isfinite().all())
    tiny = PackedState.encoded(format, values * 1e-24, 32)
    assert not bool(tiny.decode().any()), "the known weakness of the recipe: an fp16 scale underflows"


def test_solo_takes_its_base_from_the_tenth_percentile() -> None:
    values = sample(SOLO, 8, 200)
    state = PackedState.encoded(SOLO, values, 128)
    for block, columns in enumerate((slice(0, 128), slice(128, 200))):
        top, percentile = values[:, columns].amax(1), values[:, columns].quantile(0.1, dim=1)
        assert torch.equal(state.scales[:, block, 0], top)
        torch.testing.assert_close(state.scales[:, block, 1], (percentile / top) ** (1 / 3), rtol=1e-5, atol=0)


def test_solo_rounds_stochastically_in_log_space() -> None:
    scale, draws = torch.tensor([8.0, 0.25]), 400_000
    for share in (0.1, 0.5, 0.8):
        value = torch.tensor(8.0 * 0.25 ** (1 + share))
        codes = recipes.encode(SOLO, value.expand(draws), scale, torch.randint(1 << 32, (draws,)))
        steps = 3 - codes.double()
        assert set(steps.tolist()) <= {1.0, 2.0}
        assert abs(steps.mean() - 1 - share) < STANDARD_ERRORS * (share * (1 - share) / draws) ** 0.5 + 1e-6


def test_solo_survives_what_its_formula_leaves_undefined() -> None:
    values = torch.ones(3, 128)
    values[1, :40] = 0.0
    values[2, :30], values[2, 30:] = 1e-30, 1e20
    decoded = PackedState.encoded(SOLO, values, 128).decode()
    assert torch.equal(decoded[0], values[0])
    assert torch.equal(decoded[1, 40:], values[1, 40:])
    assert float(decoded[1, 0]) == pytest.approx(2.0**-60)
    assert bool(decoded.isfinite().all())


@pytest.mark.parametrize("format", RECIPES, ids=name)
def test_recoding_reaches_and_leaves_recipes(format: Format) -> None:
    values = sample(format, 16, 256)
    wide = catalog.get("mulaw8" if format.signed else "log8")
    ours = PackedState.encoded(wide, values, format.block)
    assert torch.equal(ours.recode(format).decode(), PackedState.encoded(format, ours.decode(), format.block).decode())
    theirs = PackedState.encoded(format, values, format.block)
    assert torch.equal(theirs.recode(wide).decode(), PackedState.encoded(wide, theirs.decode(), format.block).decode())
