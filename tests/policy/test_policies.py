"""Which format a state gets."""

from __future__ import annotations

import pytest
import torch

from stquant import Fixed, FormatError
from stquant.codecs import catalog
from stquant.policy import policies
from stquant.policy.policies import ParameterFacts

STATES = {"exp_avg": True, "exp_avg_sq": False}
LARGE = ParameterFacts((64, 128), torch.float32)


def chosen(policy: Fixed, facts: ParameterFacts = LARGE) -> list[str]:
    return [choice.format.name for choice in policy.choose(facts, STATES).values()]


@pytest.mark.parametrize(
    ("policy", "formats"),
    [
        (Fixed(), ["fp32", "fp32"]),
        (Fixed(bits=32), ["fp32", "fp32"]),
        (Fixed(4), ["mulaw4", "log4"]),
        (Fixed(bits=2), ["dynamic2", "log2"]),
        (Fixed(bits=8, exp_avg_sq=0), ["mulaw8", "log0"]),
        (Fixed(exp_avg="dynamic2"), ["dynamic2", "fp32"]),
        (Fixed(exp_avg="mulaw4-prepay", exp_avg_sq="log5-stochastic"), ["mulaw4-prepay", "log5-stochastic"]),
        (policies.parse("fp32"), ["fp32", "fp32"]),
        (Fixed(exp_avg="dynamic8", exp_avg_sq="udynamic8"), ["dynamic8", "udynamic8"]),
        (Fixed(exp_avg="softsign8"), ["softsign8", "fp32"]),
        (Fixed(block=64, exp_avg="dynamic8", exp_avg_sq="log1"), ["dynamic8", "log1"]),
    ],
    ids=repr,
)
def test_formats_by_name_and_width(policy: Fixed, formats: list[str]) -> None:
    policy.check(STATES)
    assert chosen(policy) == formats
    assert policies.from_dict(policy.to_dict()) == policy
    assert eval(repr(policy), {"Fixed": Fixed}) == policy


def test_what_stays_in_fp32_says_why() -> None:
    for facts, reason in (
        (ParameterFacts((128,), torch.float32), "1-D"),
        (ParameterFacts((8, 8), torch.float32), "fewer than 4096 elements"),
        (ParameterFacts((1000, 31), torch.float32), "rows of 31, shorter than 32"),
        (ParameterFacts((64, 128), torch.float64), "float64 parameter"),
    ):
        choices = Fixed(4).choose(facts, STATES)
        assert {(c.format.name, c.reason) for c in choices.values()} == {("fp32", reason)}


def test_block_size_reaches_the_format() -> None:
    choices = Fixed(4, block=64).choose(LARGE, STATES)
    assert {choice.format.block for choice in choices.values()} == {64}


def test_a_format_keeps_its_own_block_unless_one_is_given() -> None:
    for policy, block in (
        (Fixed(4), 128),
        (Fixed(exp_avg="dynamic8"), 256),
        (Fixed(exp_avg="softsign8", exp_avg_sq="sqrt8"), 32),
        (Fixed(exp_avg="softsign8", exp_avg_sq=2, block=64), 64),
    ):
        packed = [c.format for c in policy.choose(LARGE, STATES).values() if c.format.packed]
        assert {format.block for format in packed} == {policy.block} == {block}
        assert policies.from_dict(policy.to_dict()) == policy


@pytest.mark.parametrize(
    ("name", "formats", "block", "bytes_per_parameter"),
    [
        ("bnb8", ["dynamic8", "udynamic8"], 256, 2.03125),
        ("torchao4", ["dynamic4", "linear4"], 128, 1.0625),
        ("flash8", ["softsign8", "sqrt8"], 32, 2.125),
        ("solo42", ["dynamic4", "solo2"], 128, 0.84375),
        ("nf4", ["nf4", "linear4"], 128, 1.0625),
    ],
)
def test_recipes_by_name(name: str, formats: list[str], block: int, bytes_per_parameter: float) -> None:
    policy = policies.parse(name)
    policy.check(STATES)
    choices = [choice.format for choice in policy.choose(LARGE, STATES).values()]
    assert [format.name for format in choices] == formats
    assert {format.block for format in choices} == {block}
    assert sum(format.bits_per_element for format in choices) / 8 == bytes_per_parameter
    assert policies.from_dict(policy.to_dict()) == policy
    assert [f.name for f in policy.formats_of({"momentum_buffer": True}).values()] == formats[:1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Fixed(exp_avg="int4"), "format 'int4' is unknown; the catalogue has"),
        (lambda: Fixed(7).check(STATES), "bits=7 is not available for a signed state; use one of"),
        (lambda: Fixed(1).check(STATES), "bits=1 is not available for a signed state"),
        (lambda: Fixed(4, block=100), "block=100 is not a power of two"),
        (lambda: Fixed(4, block=16), "block=16 is not a power of two of at least 32"),
        (lambda: Fixed(exp_avg="dynamic8", exp_avg_sq=2), r"blocks of several sizes \(dynamic8: 256, 2 bits: 128\)"),
        (lambda: Fixed(exp_avg="udynamic8").check(STATES), "format 'udynamic8' does not fit exp_avg, which is signed"),
        (lambda: Fixed(exp_avg="log4").check(STATES), "format 'log4' does not fit exp_avg, which is signed"),
        (lambda: Fixed(exp_avg_sq="mulaw4").check(STATES), "does not fit exp_avg_sq, which is non-negative"),
        (lambda: Fixed(momentum=4).check(STATES), "names state 'momentum'; this optimizer has exp_avg, exp_avg_sq"),
    ],
)
def test_wrong_policies_raise(make: object, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        make()  # type: ignore[operator]


def test_unknown_names_and_objects_raise() -> None:
    with pytest.raises(ValueError, match="policy='tiny' is unknown; use one of"):
        policies.parse("tiny")
    with pytest.raises(ValueError, match="recipe 'bnb4' is unknown; use one of bnb8"):
        policies.from_dict({"kind": "recipe", "name": "bnb4"})
    with pytest.raises(TypeError, match="is not a policy"):
        policies.parse(4)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="kind 'later' is unknown; known are 'fixed'"):
        policies.from_dict({"kind": "later"})


def test_numbers_of_the_catalogue_are_pinned() -> None:
    """Checkpoints hold them: a released number keeps its meaning for ever."""
    numbers = {
        "fp32": 0,
        "dynamic0": 1,
        "dynamic2": 2,
        "dynamic3": 3,
        "mulaw4": 4,
        "mulaw5": 5,
        "mulaw6": 6,
        "mulaw8": 8,
        "dynamic2-plain": 12,
        "dynamic3-plain": 13,
        "mulaw4-prepay": 14,
        "mulaw5-prepay": 15,
        "mulaw6-prepay": 16,
        "mulaw8-prepay": 18,
        "log0": 20,
        "log1": 21,
        "log2": 22,
        "log3": 23,
        "log4": 24,
        "log5": 25,
        "log6": 26,
        "log8": 28,
        "log1-nearest": 31,
        "log2-nearest": 32,
        "log3-nearest": 33,
        "log4-nearest": 34,
        "log5-stochastic": 35,
        "log6-stochastic": 36,
        "log8-stochastic": 38,
        "dynamic8": 40,
        "udynamic8": 41,
        "dynamic4": 42,
        "linear4": 43,
        "nf4": 44,
        "softsign8": 45,
        "sqrt8": 46,
        "solo2": 47,
    }
    assert {format.name: format.number for format in catalog.formats()} == numbers
    assert all(catalog.from_number(format.number) == format for format in catalog.formats())
    with pytest.raises(FormatError, match="format number 99 is unknown"):
        catalog.from_number(99)
