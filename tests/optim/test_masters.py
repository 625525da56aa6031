"""bf16 models that start from fp32 weights and give them back."""

from __future__ import annotations

import copy

import pytest
import torch

import stquant
from tests.optim.helpers import gradients, run


def model() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Embedding(64, 128), torch.nn.Linear(128, 96), torch.nn.BatchNorm1d(96))


def test_sixteen_bits_give_the_same_weights_back() -> None:
    net = model()
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    objects = list(net.parameters())
    masters = stquant.cast_model(net, master_bits=16)
    assert all(a is b for a, b in zip(objects, net.parameters(), strict=True))
    assert {p.dtype for p in net.parameters()} == {torch.bfloat16}
    optimizer = stquant.AdamW(net.named_parameters(), masters=masters, master_bits=16)
    optimizer.init_state()
    exported = stquant.export_fp32(net, optimizer)
    assert exported.keys() == net.state_dict().keys()
    for name, weight in before.items():
        assert torch.equal(exported[name], weight)


@pytest.mark.parametrize("bits", ["auto", 4, 1, 0])
def test_fewer_bits_give_the_nearest_weights(bits: int | str) -> None:
    net = model()
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    masters = stquant.cast_model(net, master_bits=bits)
    optimizer = stquant.AdamW(net.named_parameters(), masters=masters, master_bits=bits)
    optimizer.init_state()
    exported = stquant.export_fp32(net, optimizer)
    # Half a unit: 2**-9 of a power of two for bf16, halved by every bit of the residual.
    unit = 2.0 ** -(8 if bits == 0 else 8 + (8 if bits == "auto" else int(bits)))
    for name, weight in before.items():
        torch.testing.assert_close(exported[name], weight, rtol=unit, atol=0)


def test_training_from_masters_equals_training_in_fp32() -> None:
    single = model()
    half = copy.deepcopy(single)
    masters = stquant.cast_model(half, master_bits=16)
    optimizers = [
        stquant.AdamW(single.named_parameters(), lr=1e-2),
        stquant.AdamW(half.named_parameters(), lr=1e-2, masters=masters, master_bits=16),
    ]
    params = [list(m.parameters()) for m in (single, half)]
    for grads in gradients(params[1], 5):
        run(optimizers[0], params[0], [[g.float() for g in grads]])
        run(optimizers[1], params[1], [grads])
    exported = stquant.export_fp32(half, optimizers[1])
    for name, weight in single.named_parameters():
        assert torch.equal(exported[name], weight.detach())


def test_masters_survive_a_copy_before_the_first_step() -> None:
    net = model()
    optimizer = stquant.AdamW(net.named_parameters(), masters=stquant.cast_model(net))
    other_net, other = copy.deepcopy((net, optimizer))
    for o in (optimizer, other):
        o.init_state()
    a, b = stquant.export_fp32(net, optimizer), stquant.export_fp32(other_net, other)
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert any(bool(state["residual"].unpack().any()) for state in optimizer.state.values())


def test_tied_weights_are_exported_under_both_names() -> None:
    net = model()
    net.add_module("head", torch.nn.Linear(128, 64, bias=False))
    net.head.weight = net[0].weight  # type: ignore[union-attr, index]
    optimizer = stquant.AdamW(net.named_parameters(), masters=stquant.cast_model(net))
    optimizer.init_state()
    exported = stquant.export_fp32(net, optimizer)
    assert exported["head.weight"].dtype is torch.float32
    assert torch.equal(exported["head.weight"], exported["0.weight"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(unknown=torch.zeros(1, dtype=torch.int16)), "masters has 'unknown', which is no parameter"),
        (lambda m: m.update({"0.weight": torch.zeros(2, dtype=torch.int16)}), r"allowed is int16 \(64, 128\)"),
        (lambda m: m.update({"0.weight": m["0.weight"].float()}), "is torch.float32"),
        (lambda m: m["0.weight"].fill_(1), "needs more than the 8 bits of master_bits"),
    ],
)
def test_masters_that_do_not_fit_raise(change: object, message: str) -> None:
    net = model()
    masters = stquant.cast_model(net)
    change(masters)  # type: ignore[operator]
    with pytest.raises(ValueError, match=message):
        stquant.AdamW(net.named_parameters(), masters=masters)


def test_impossible_casts_raise() -> None:
    for bits in (None, 9, "8"):
        with pytest.raises(ValueError, match="master_bits"):
            stquant.cast_model(model(), master_bits=bits)  # type: ignore[arg-type]
