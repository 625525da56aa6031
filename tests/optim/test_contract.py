"""What a user of torch.optim expects: arguments, groups, hooks, strides, refusals."""

from __future__ import annotations

import contextlib
import inspect
from typing import Any

import pytest
import torch

import stquant
from stquant.codecs import catalog
from stquant.kernels import cpu
from tests.cases import PLAIN_SHAPES, name
from tests.cases import SHAPES as PACKED_SHAPES
from tests.optim.helpers import POLICIES, gradients, parameters, run, same, snapshot

compiled = pytest.mark.skipif(cpu.REASON is not None, reason="the compiled kernels are not installed")


@pytest.mark.parametrize("cls", ["AdamW", "Adam", "SGD"])
def test_signatures_extend_those_of_torch(cls: str) -> None:
    ours = list(inspect.signature(getattr(stquant, cls)).parameters.values())
    theirs = list(inspect.signature(getattr(torch.optim, cls)).parameters.values())
    assert [(p.name, p.kind, p.default) for p in ours[: len(theirs)]] == [(p.name, p.kind, p.default) for p in theirs]
    added = ["policy", "master_bits", "masters", "backend", "seed", "process_group"]
    assert [p.name for p in ours[len(theirs) :]] == added
    assert all(p.kind is p.KEYWORD_ONLY for p in ours[len(theirs) :])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr=-1.0 is out of range; allowed is at least 0"),
        ({"eps": -1e-8}, "eps=-1e-08 is out of range"),
        ({"weight_decay": -1}, "weight_decay=-1 is out of range"),
        ({"betas": (1.0, 0.9)}, r"betas=\(1.0, 0.9\) is out of range; allowed is at least 0 and below 1"),
        ({"betas": (0.9, -0.1)}, "betas"),
        ({"lr": float("nan")}, "lr=nan is out of range"),
        ({"foreach": True}, "foreach=True is not supported"),
        ({"fused": True, "backend": "reference"}, "no compiled kernel serves it .backend='reference' is plain torch"),
        ({"differentiable": True}, "differentiable=True is not supported"),
        ({"amsgrad": True}, "amsgrad=True needs policy='fp32'"),
        ({"policy": "int4"}, "policy='int4' is unknown"),
        ({"backend": "cuda"}, "backend='cuda' is unknown; use None or one of"),
        ({"seed": 0.5}, "seed=0.5 is not an integer"),
    ],
    ids=str,
)
def test_arguments_that_cannot_be_honoured_raise(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, stquant.BackendError), match=message):
        stquant.AdamW(parameters(), **options)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: stquant.SGD(p, momentum=-0.1), "momentum=-0.1 is out of range"),
        (lambda p: stquant.SGD(p, nesterov=True), "needs a momentum above 0 and dampening 0"),
        (lambda p: stquant.SGD(p, momentum=1.0, policy=stquant.Fixed(bits=2)), "which momentum=1.0 does not admit"),
        (lambda p: stquant.SGD(p, momentum=0.9, policy=stquant.Fixed(exp_avg=4)), "this optimizer has momentum_buffer"),
        (lambda p: stquant.Lion(p, betas=(0.9, 1.0)), "betas"),
        (lambda p: stquant.Lion(p, policy=stquant.Fixed(bits=2)), "the sign update of Lion does not admit"),
    ],
)
def test_wrong_options_of_sgd_and_lion_raise(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(parameters())


@pytest.mark.parametrize("cls", [stquant.AdamW, stquant.Adam, stquant.SGD, stquant.Lion])
@pytest.mark.parametrize("option", ["foreach", "differentiable"])
def test_every_optimizer_refuses_what_it_cannot_honour(cls: Any, option: str) -> None:
    if option in inspect.signature(cls).parameters:
        with pytest.raises(ValueError, match=f"{option}=True is not supported"):
            cls(parameters(), **{option: True})
    else:
        with pytest.raises(TypeError, match=option):
            cls(parameters(), **{option: True})


def test_a_momentum_that_is_switched_on_later_gets_its_state() -> None:
    params = parameters([(64, 128)])
    optimizer = stquant.SGD(params, lr=0.1)
    run(optimizer, params, gradients(params, 1))
    assert optimizer.ledger().bytes == 4
    optimizer.param_groups[0]["momentum"] = 0.9
    run(optimizer, params, gradients(params, 2))
    assert optimizer.state[params[0]]["momentum_buffer"].format.name == "dynamic2"


@pytest.mark.parametrize("options", [{"foreach": False}, {"fused": False}, {"fused": None}, {"foreach": None}])
def test_what_frameworks_pass_explicitly_is_taken(options: dict[str, Any]) -> None:
    stquant.AdamW(parameters(), **options)


@compiled
@pytest.mark.parametrize("cls", [stquant.AdamW, stquant.Adam, stquant.SGD, stquant.Lion])
def test_fused_is_taken_where_compiled_kernels_serve(cls: Any) -> None:
    outcomes = []
    for fused in (True, None):
        params = parameters()
        optimizer = cls(params, lr=1e-2, fused=fused)
        run(optimizer, params, gradients(params, 2))
        outcomes.append(snapshot(optimizer, params))
    assert same(*outcomes)


@compiled
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: {"params": [torch.nn.Parameter(torch.zeros(64, 128, device="meta"))]}, "a tensor is on meta"),
        (lambda: {"params": parameters(dtype=torch.float64)}, "a tensor is torch.float64"),
        (lambda: {"params": [torch.nn.Parameter(torch.zeros(128, 64).t())]}, "a tensor is not contiguous"),
        (lambda: {"params": parameters([(64, 256)]), "policy": "bnb8"}, "'dynamic8' is that of a published recipe"),
        (lambda: {"params": parameters([(64, 4096)]), "policy": stquant.Fixed(4, block=2048)}, "blocks of more than"),
    ],
)
def test_fused_raises_where_the_reference_would_serve(make: Any, message: str) -> None:
    stquant.AdamW([make()])
    with pytest.raises(ValueError, match=f"fused=True is not supported for parameter 'group 0 / 0'.*{message}"):
        stquant.AdamW([make()], fused=True)


def test_how_steps_are_computed_is_not_read_from_a_file() -> None:
    params = parameters()
    theirs = torch.optim.AdamW(params, fused=True, capturable=False)
    run(theirs, params, gradients(params, 1))
    ours = stquant.AdamW(params, backend="reference")
    ours.load_state_dict(theirs.state_dict())
    assert ours.param_groups[0]["fused"] is None


def test_a_refused_group_is_not_added() -> None:
    params = parameters([(64, 128), (40, 160)])
    optimizer = stquant.AdamW(params[:1])
    for group in (
        {"params": params[1:], "lr": -1.0},
        {"params": params[1:], "policy": stquant.Fixed(7)},
        {"params": params[1:], "policy": stquant.Fixed(4), "master_bits": 9},
    ):
        given = dict(group)
        with pytest.raises(ValueError, match="is"):
            optimizer.add_param_group(group)
        assert len(optimizer.param_groups) == 1
        assert group.get("policy") == given.get("policy")
    optimizer.add_param_group({"params": params[1:], "policy": stquant.Fixed(4), "lr": 0.5})
    optimizer.init_state()
    assert optimizer.state[params[1]]["exp_avg"].format.name == "mulaw4"
    assert optimizer.state[params[0]]["exp_avg"].format.name == "dynamic2"


def test_groups_choose_policy_and_residual_for_themselves() -> None:
    params = parameters([(64, 128)] * 3, torch.bfloat16)
    groups = [
        {"params": params[:1], "policy": "fp32", "master_bits": 4},
        {"params": params[1:2], "policy": stquant.Fixed(8), "lr": 0.5},
        {"params": params[2:], "master_bits": 0},
    ]
    first = stquant.AdamW(groups, lr=1e-2, policy=stquant.Fixed(4), seed=3)
    again = stquant.AdamW(groups, lr=1e-2, policy="fp32")
    for optimizer, default in ((first, "mulaw4"), (again, None)):
        optimizer.init_state()
        states = [optimizer.state[p] for p in params]
        assert isinstance(states[0]["exp_avg"], torch.Tensor)
        assert states[0]["residual"].bits == 4
        assert states[1]["exp_avg"].format.name == "mulaw8"
        assert states[1]["residual"].bits == 8
        assert getattr(states[2]["exp_avg"], "format", catalog.FLOAT32).name == (default or "fp32")
        assert "residual" not in states[2]
        assert [group["lr"] for group in optimizer.param_groups] == [1e-2, 0.5, 1e-2]
        assert not any(group.keys() & {"policy", "master_bits"} for group in optimizer.param_groups)
    assert '"seed": 3' in first.param_groups[0]["stquant"]


def test_sparse_gradients_raise_before_anything_changes() -> None:
    params = parameters([(64, 128), (64, 128)])
    optimizer = stquant.AdamW(params)
    run(optimizer, params, gradients(params, 1))
    before = snapshot(optimizer, params)
    params[0].grad = torch.ones(64, 128)
    params[1].grad = torch.ones(64, 128).to_sparse()
    with pytest.raises(RuntimeError, match=r"group 0 / 1.*layout torch.sparse_coo, allowed is a dense one"):
        optimizer.step()
    assert same(snapshot(optimizer, params), before)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn])
def test_other_dtypes_raise(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=f"has dtype {dtype}; allowed are"):
        stquant.AdamW([torch.nn.Parameter(torch.zeros(64, 128).to(dtype))])


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
def test_gradients_are_never_modified(policy: Any) -> None:
    params = parameters()
    optimizer = stquant.AdamW(params, policy=policy, maximize=True)
    for grads in gradients(params, 2):
        run(optimizer, params, [grads])
        assert all(torch.equal(p.grad, g) for p, g in zip(params, grads, strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", ["transposed", "strided", "channels_last"])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
def test_strides_are_kept_and_do_not_matter(policy: Any, layout: str) -> None:
    def shaped(values: torch.Tensor) -> torch.Tensor:
        if layout == "transposed":
            return values.t().contiguous().t()
        if layout == "channels_last":
            return values.view(16, 8, 8, 8).contiguous(memory_format=torch.channels_last)
        wide = torch.zeros(64, 256)
        wide[:, ::2] = values
        return wide[:, ::2]

    shape = (16, 8, 8, 8) if layout == "channels_last" else (64, 128)
    plain = torch.nn.Parameter(parameters([(64, 128)])[0].detach().view(shape).clone())
    other = torch.nn.Parameter(shaped(parameters([(64, 128)])[0].detach()))
    strides = other.stride()
    optimizers = [stquant.AdamW([p], lr=1e-2, policy=policy) for p in (plain, other)]
    for (grad,) in gradients([torch.empty(64, 128)], 3):
        plain.grad, other.grad = grad.view(shape).clone(), shaped(grad)
        for optimizer in optimizers:
            optimizer.step()
    assert other.stride() == strides
    assert torch.equal(plain, other)
    assert same(snapshot(optimizers[0], [])[1:], snapshot(optimizers[1], [])[1:])


def test_an_expanded_gradient_equals_its_dense_copy() -> None:
    params = [parameters([(64, 128)])[0] for _ in range(2)]
    optimizers = [stquant.AdamW([p], lr=1e-2) for p in params]
    row = torch.randn(1, 128)
    params[0].grad, params[1].grad = row.expand(64, 128), row.expand(64, 128).clone()
    for optimizer in optimizers:
        optimizer.step()
    assert torch.equal(*params)


@pytest.mark.parametrize("shape", [*PLAIN_SHAPES, *PACKED_SHAPES], ids=name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_shape_steps(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    param = torch.nn.Parameter(torch.randn(shape).to(dtype))
    start = param.detach().clone()
    optimizer = stquant.AdamW([param], lr=1e-2, weight_decay=0.0)
    for _ in range(2):
        param.grad = torch.ones_like(param)
        optimizer.step()
    # Two steps of one sign move every weight by about 2 * lr; fp16 and bf16 round that by a part.
    moved = (start.float() - param.detach().float()).flatten()
    assert moved.numel() == 0 or 0.005 < float(moved.mean()) < 0.05


@compiled
def test_the_backend_that_was_asked_for_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    def native(*_: Any) -> None:
        raise AssertionError("compiled")

    monkeypatch.setattr(cpu._cpu, "adam", native)
    params = parameters([(64, 128)])
    run(stquant.AdamW(params, backend="reference"), params, gradients(params, 1))
    for backend in ("cpu", None):
        with pytest.raises(AssertionError, match="compiled"):
            run(stquant.AdamW(params, backend=backend), params, gradients(params, 1))


@compiled
def test_many_tiny_tensors_are_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    native = cpu._cpu.adam
    monkeypatch.setattr(cpu._cpu, "adam", lambda *given: (calls.append(1), native(*given)))
    params = [torch.nn.Parameter(torch.randn(8)) for _ in range(5000)]
    start = [p.detach().clone() for p in params]
    optimizer = stquant.AdamW(params, lr=1e-2, weight_decay=0.0)
    run(optimizer, params, [[torch.ones(8)] * 5000] * 2)
    assert len(optimizer.state) == 5000
    assert len(calls) == 2
    for p, s in zip(params, start, strict=True):
        # Two steps of lr; weights of a few units are rounded twice.
        torch.testing.assert_close(p.detach(), s - 2e-2, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_gradients_of_another_dtype_are_converted(dtype: torch.dtype) -> None:
    outcomes = []
    for given in (dtype, torch.bfloat16):
        params = parameters(dtype=torch.bfloat16)
        optimizer = stquant.AdamW(params, lr=1e-2)
        for grads in gradients(params, 2):
            for p, g in zip(params, grads, strict=True):
                p.grad_dtype = given
                # What bf16 and fp16 both hold exactly.
                p.grad = torch.where(g.abs() < 2.0**-10, 0.0, g).clamp(-100, 100).bfloat16().to(given)
            optimizer.step()
        outcomes.append(snapshot(optimizer, params))
    assert same(*outcomes)


def test_closures_are_evaluated_with_gradients() -> None:
    param = torch.nn.Parameter(torch.ones(64, 128))
    optimizer = stquant.AdamW([param], lr=0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = param.square().sum()
        loss.backward()
        return loss

    first, second = optimizer.step(closure), optimizer.step(closure)
    assert second < first


def test_missing_gradients_are_skipped() -> None:
    params = parameters([(64, 128), (40, 160)])
    optimizer = stquant.AdamW(params)
    params[0].grad = torch.ones_like(params[0])
    start = params[1].detach().clone()
    optimizer.step()
    assert torch.equal(params[1], start)
    assert (optimizer.state[params[0]]["step"], optimizer.state[params[1]]["step"]) == (1, 0)


def test_the_global_default_dtype_changes_nothing() -> None:
    outcomes = []
    for dtype in (torch.float32, torch.bfloat16):
        params = parameters()
        grads = list(gradients(params, 3))
        torch.set_default_dtype(dtype)
        try:
            optimizer = stquant.AdamW(params, lr=1e-2)
            run(optimizer, params, grads)
        finally:
            torch.set_default_dtype(torch.float32)
        outcomes.append(snapshot(optimizer, params))
    assert same(*outcomes)


def test_a_rebuilt_optimizer_keeps_its_policy() -> None:
    """Some wrappers make a new optimizer of the same class from the old one's groups."""
    params = parameters([(64, 128)])
    optimizer = stquant.AdamW(params, policy=stquant.Fixed(4), seed=7)
    rebuilt = type(optimizer)(optimizer.param_groups)
    rebuilt.init_state()
    assert rebuilt.state[params[0]]["exp_avg"].format.name == "mulaw4"
    assert rebuilt.param_groups[0]["stquant"] == optimizer.param_groups[0]["stquant"]


def test_flat_partitions_that_stay_in_fp32_are_announced() -> None:
    """A wrapper that swaps in one vector for all parameters would else lose the packing without a word."""
    matrix, flat = torch.nn.Parameter(torch.ones(64, 128)), torch.nn.Parameter(torch.ones(1 << 20))
    flat.grad = torch.ones_like(flat)
    for policy, packs in (("adaptive", False), ("fp32", None), (stquant.Budget(bits=3, flat=True), True)):
        optimizer = stquant.AdamW([matrix], policy=policy)
        optimizer.param_groups[0]["params"] = [flat]
        expected = pytest.warns(
            UserWarning, match="'group 0 / 0' with 1,048,576 elements; .* need a policy with flat=True"
        )
        with expected if packs is False else contextlib.nullcontext():
            optimizer.step()
        assert any(row.format != "fp32" for row in optimizer.ledger().rows) is bool(packs)
        optimizer.step()  # says it once


def test_noise_depends_on_seed_and_parameter_only() -> None:
    def train(seed: int, groups: bool) -> list[torch.Tensor]:
        params = parameters([(64, 128), (40, 160)])
        given: Any = [{"params": [p]} for p in params] if groups else params
        optimizer = stquant.AdamW(given, lr=1e-2, seed=seed, policy=stquant.Fixed(exp_avg=2, exp_avg_sq=1))
        run(optimizer, params, gradients(params, 3))
        return snapshot(optimizer, params)

    assert same(train(0, False), train(0, True))
    assert not same(train(0, False), train(1, False))
