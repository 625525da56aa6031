"""What is measured on a sample is what the step then does."""

from __future__ import annotations

import math

import pytest
import torch

from stquant.codecs import catalog
from stquant.codecs.blocks import Grid
from stquant.codecs.format import Format
from stquant.kernels.ops import AdamRule, Item, LionRule, Rule, SGDRule
from stquant.kernels.reference import adam_step_, lion_step_, measure, sgd_step_
from stquant.kernels.reference.measurement import energies, names
from stquant.kernels.reference.sample import SAMPLE
from stquant.storage.packed import PackedState

ADAM = AdamRule(1e-3, (0.9, 0.99), 1e-8, 0.1, True, False, 7)
SGD = SGDRule(1e-2, 0.9, 0.0, 0.0, True, False, 7)
LION = LionRule(1e-3, (0.9, 0.99), 0.1, True, 7)
STEPS = {AdamRule: adam_step_, SGDRule: sgd_step_, LionRule: lion_step_}

SIGNED = tuple(catalog.default_for(bits, True) for bits in (2, 3, 4, 5, 6, 8))
NON_NEGATIVE = tuple(catalog.default_for(bits, False) for bits in (0, 1, 2, 3, 4, 5, 6, 8))
PLAIN = tuple(format for format in SIGNED if not format.prepay)

CASES = [
    (ADAM, {"exp_avg": SIGNED, "exp_avg_sq": NON_NEGATIVE}),
    (SGD, {"momentum_buffer": SIGNED}),
    (LION, {"exp_avg": PLAIN}),
]
IDS = ["adam", "sgd", "lion"]

EXACT = 2.0**-13
"""A block's energy is a multiple of 2**-14 of the lower end of its bin."""


def item(formats: dict[str, Format], shape: tuple[int, ...] = (6, 160), steps: int = 3, seed: int = 0) -> Item:
    generator = torch.Generator().manual_seed(seed)
    param = torch.randn(shape, generator=generator)
    states = {
        name: PackedState.encoded(
            format, torch.randn(shape, generator=generator).mul(1e-3) ** (1 if format.signed else 2), format.block
        )
        for name, format in formats.items()
    }
    grad = torch.randn(shape, generator=generator) * 1e-3
    grad[torch.rand(shape, generator=generator) < 0.1] = 0.0
    return Item(param, grad, states, None, False, steps, 5)


def found(one: Item, rule: Rule, candidates: dict[str, tuple[Format, ...]]) -> dict[str, float]:
    return dict(zip(names(candidates), energies(measure([one], rule, candidates))[0].tolist(), strict=True))


@pytest.mark.parametrize(("rule", "candidates"), CASES, ids=IDS)
def test_what_each_format_keeps_is_what_the_step_stores(rule: Rule, candidates: dict[str, tuple[Format, ...]]) -> None:
    for position in range(max(map(len, candidates.values()))):
        formats = {name: ladder[position % len(ladder)] for name, ladder in candidates.items()}
        one = item(formats)
        assert one.param.numel() <= SAMPLE, "the sample is the whole tensor"
        before = {name: state.decode() for name, state in one.states.items() if isinstance(state, PackedState)}
        energy = found(one, rule, candidates)
        STEPS[type(rule)]([one], rule)
        assert energy["elements"] == one.param.numel()
        assert energy["grad"] == pytest.approx(float(one.grad.double().square().sum()), rel=EXACT)
        assert energy["grad.abs"] == pytest.approx(float(one.grad.abs().double().sum()), rel=EXACT)
        assert energy["grad.zeros"] == int((one.grad == 0).sum())
        for name, format in formats.items():
            state = one.states[name]
            assert isinstance(state, PackedState)
            stored = state.decode().double()
            assert energy[f"{name}.{format.name}.stored"] == pytest.approx(float(stored.square().sum()), rel=EXACT)
            assert energy[f"{name}.value"] > 0
            assert before[name].shape == stored.shape


def test_damage_is_the_change_of_the_move_that_rounding_makes() -> None:
    """Against the formula of the AdamW step in double."""
    formats = {"exp_avg": SIGNED[0], "exp_avg_sq": NON_NEGATIVE[1]}
    one, step = item(formats), 3
    old = {name: state.decode().double() for name, state in one.states.items() if isinstance(state, PackedState)}
    grad = one.grad.double()
    m = 0.9 * old["exp_avg"] + 0.1 * grad
    v = 0.99 * old["exp_avg_sq"] + 0.01 * grad**2
    energy = found(one, ADAM, CASES[0][1])
    adam_step_([one], ADAM)
    kept = {name: state.decode().double() for name, state in one.states.items() if isinstance(state, PackedState)}

    def move(m: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return 1e-3 * m / (1 - 0.9**step) / ((v / (1 - 0.99**step)).sqrt() + 1e-8)

    exact = move(m, v)
    assert energy["move"] == pytest.approx(float(exact.square().sum()), rel=1e-3)
    for name, other in (("exp_avg.dynamic2", (kept["exp_avg"], v)), ("exp_avg_sq.log1", (m, kept["exp_avg_sq"]))):
        expected = float((move(*other) - exact).square().sum())
        # fp32 against double: an element next to a threshold may fall on the other side.
        assert energy[f"{name}.damage"] == pytest.approx(expected, rel=1e-2)


@pytest.mark.parametrize(("rule", "candidates"), CASES, ids=IDS)
def test_measuring_changes_nothing_and_repeats(rule: Rule, candidates: dict[str, tuple[Format, ...]]) -> None:
    one = item({name: ladder[-1] for name, ladder in candidates.items()}, shape=(64, 200))
    before = [t.clone() for state in one.states.values() for t in state.tensors()]  # type: ignore[union-attr]
    first, second = measure([one], rule, candidates), measure([one], rule, candidates)
    assert torch.equal(first, second)
    after = [t for state in one.states.values() for t in state.tensors()]  # type: ignore[union-attr]
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))


def test_batches_do_not_matter() -> None:
    candidates = CASES[0][1]
    items = [item({"exp_avg": SIGNED[1], "exp_avg_sq": NON_NEGATIVE[2]}, seed=seed) for seed in range(40)]
    together = measure(items, ADAM, candidates)
    assert all(
        torch.equal(measure([one], ADAM, candidates)[0], part) for one, part in zip(items, together, strict=True)
    )


@pytest.mark.parametrize("shape", [(300, 160), (3, 5000), (1, 9000), (50, 33), (8, 3, 16, 16), (0, 64)])
def test_the_sample_is_bounded_and_moves(shape: tuple[int, ...]) -> None:
    candidates = CASES[0][1]
    seen = set()
    for step in range(1, 40):
        one = item({"exp_avg": SIGNED[1], "exp_avg_sq": NON_NEGATIVE[2]}, shape, steps=step)
        energy = found(one, ADAM, candidates)
        elements, row = math.prod(shape), Grid.of(shape, 128).row
        assert energy["elements"] <= min(elements, SAMPLE + row)
        assert energy["elements"] > 0 or elements == 0
        seen.add(energy["grad"])
    assert len(seen) >= min(3, -(-elements // SAMPLE))


def test_strides_do_not_matter() -> None:
    candidates = CASES[0][1]
    one = item({"exp_avg": SIGNED[1], "exp_avg_sq": NON_NEGATIVE[2]}, (100, 160))
    turned = Item(
        one.param.t().contiguous().t(), one.grad.t().contiguous().t(), one.states, None, False, one.step, one.noise_id
    )
    assert not turned.param.is_contiguous()
    assert torch.equal(measure([one], ADAM, candidates), measure([turned], ADAM, candidates))


def test_a_non_finite_gradient_is_left_out() -> None:
    candidates = CASES[0][1]
    one = item({"exp_avg": SIGNED[1], "exp_avg_sq": NON_NEGATIVE[2]})
    one.grad[0, 0], one.grad[5, 5] = math.inf, math.nan
    energy = found(one, ADAM, candidates)
    assert energy["elements"] == one.param.numel() - 2
    assert all(math.isfinite(value) for value in energy.values())
