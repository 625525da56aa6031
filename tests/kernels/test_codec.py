"""Encoding, decoding and recoding whole states."""

from __future__ import annotations

import pytest
import torch

from stquant.codecs import catalog
from stquant.codecs.format import Format
from stquant.kernels import reference
from stquant.storage.packed import PackedState
from tests.cases import PACKED, PLAIN_SHAPES, SHAPES, name


def sample(shape: tuple[int, ...], format: Format) -> torch.Tensor:
    values = torch.randn(shape) * torch.exp(2 * torch.randn(shape))
    return values if format.signed else values.square()


@pytest.mark.parametrize("shape", [*SHAPES, *PLAIN_SHAPES], ids=name)
@pytest.mark.parametrize("format", PACKED, ids=name)
def test_decoded_values_encode_to_the_same_codes(format: Format, shape: tuple[int, ...]) -> None:
    first = PackedState.encoded(format, sample(shape, format), 128)
    decoded = first.decode()
    assert decoded.shape == shape
    assert bool(decoded.isfinite().all())
    if format.signed and format.bits:
        again = PackedState.encoded(format, decoded, 128)
        assert torch.equal(again.codes, first.codes)
        torch.testing.assert_close(again.scales, first.scales, rtol=2**-22, atol=0)


@pytest.mark.parametrize("format", PACKED, ids=name)
def test_every_element_is_written(format: Format) -> None:
    state = PackedState.zeros(format, PackedState.encoded(format, torch.ones(3, 129), 128).grid)
    state.codes.fill_(0xAA)
    state.scales.fill_(float("nan"))
    reference.encode_(state, sample((3, 129), format))
    out = torch.full((3, 129), float("nan"))
    assert bool(reference.decode(state, out).isfinite().all())
    if format.bits == 8:
        assert not bool(state.codes[:, -7:].any()), "padding of the short block's single lane"


@pytest.mark.parametrize("view", ["transposed", "channels_last", "strided", "expanded"])
@pytest.mark.parametrize("format", [catalog.get("mulaw8"), catalog.get("log2")], ids=name)
def test_strides_do_not_matter(format: Format, view: str) -> None:
    values = {
        "transposed": lambda: sample((160, 64), format).t(),
        "channels_last": lambda: sample((16, 8, 5, 5), format).contiguous(memory_format=torch.channels_last),
        "strided": lambda: sample((40, 400), format)[:, ::2],
        "expanded": lambda: sample((1, 160), format).expand(64, 160),
    }[view]()
    ours = PackedState.encoded(format, values, 128)
    plain = PackedState.encoded(format, values.contiguous(), 128)
    assert torch.equal(ours.codes, plain.codes)
    assert torch.equal(ours.scales, plain.scales)
    out = torch.empty_strided(values.shape, values.stride()) if view != "expanded" else torch.empty(values.shape)
    assert torch.equal(reference.decode(ours, out), plain.decode())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes_are_converted(dtype: torch.dtype) -> None:
    values = sample((8, 160), catalog.get("mulaw8")).to(dtype)
    ours = PackedState.encoded(catalog.get("mulaw8"), values, 128)
    assert torch.equal(ours.codes, PackedState.encoded(catalog.get("mulaw8"), values.float(), 128).codes)


def test_non_finite_values_count_as_zero() -> None:
    values = torch.randn(8, 160)
    values[0, 3], values[1, 4], values[2, 5] = float("nan"), float("inf"), -float("inf")
    for format in (catalog.get("mulaw8"), catalog.get("log8")):
        cleaned = torch.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)
        cleaned = cleaned if format.signed else cleaned.clamp(min=0)
        assert torch.equal(
            PackedState.encoded(format, values, 128).decode(), PackedState.encoded(format, cleaned, 128).decode()
        )


@pytest.mark.parametrize("target", ["log0", "log1", "log4", "log8"])
def test_recoding_an_average_of_squares_keeps_block_means_exactly(target: str) -> None:
    source = PackedState.encoded(catalog.get("log4"), torch.rand(64, 160), 128)
    moved = source.recode(catalog.get(target))
    assert torch.equal(moved.scales, source.scales)
    assert moved.grid == source.grid
    if target in ("log4", "log8"):
        torch.testing.assert_close(moved.decode(), source.decode(), rtol=2**-6, atol=0)


def test_recoding_to_more_bits_keeps_values() -> None:
    source = PackedState.encoded(catalog.get("dynamic2"), torch.randn(64, 160), 128)
    wide = source.recode(catalog.get("mulaw8")).decode()
    torch.testing.assert_close(wide, source.decode(), rtol=2**-5, atol=0)


@pytest.mark.parametrize("power", [-40, -20, 0, 20])
@pytest.mark.parametrize("format", PACKED, ids=name)
def test_encoding_does_not_depend_on_the_size_of_values(format: Format, power: int) -> None:
    values = sample((64, 160), format)
    factor = 2.0 ** (power if format.signed else 2 * power)
    plain, scaled = (PackedState.encoded(format, v, 128) for v in (values, values * factor))
    assert torch.equal(plain.codes, scaled.codes)
    assert torch.equal(plain.scales * factor, scaled.scales)
