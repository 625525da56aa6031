"""One property over everything at once: layout, groups and interruptions change no bit.

`pytest --hypothesis-profile=long tests/optim/test_properties.py` tries 10,000 examples.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import torch
from hypothesis import given

import stquant
from tests.optim.helpers import gradients, run, same, snapshot

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (stquant.AdamW, {"lr": 1e-2}),
    "adam": (stquant.Adam, {"lr": 1e-2, "weight_decay": 0.1, "maximize": True}),
    "sgd": (stquant.SGD, {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1}),
    "nesterov": (stquant.SGD, {"lr": 1e-2, "momentum": 0.8, "nesterov": True}),
    "lion": (stquant.Lion, {"lr": 1e-3, "weight_decay": 0.1}),
}


@dataclass(frozen=True)
class Layout:
    """How a parameter lies in memory."""

    order: tuple[int, ...]
    gap: int

    def apply(self, values: torch.Tensor) -> torch.Tensor:
        order = [i % max(1, values.ndim) for i in self.order[: values.ndim]]
        order = list(dict.fromkeys(order)) + [i for i in range(values.ndim) if i not in order]
        shape = [values.shape[i] for i in order]
        if not shape:
            return values.clone()
        wide = torch.zeros([*shape[:-1], shape[-1] * self.gap], dtype=values.dtype)
        strided = wide[..., :: self.gap] if self.gap > 1 else wide
        back = strided.permute([order.index(i) for i in range(values.ndim)])
        return back.copy_(values)


layouts = st.builds(Layout, st.permutations(range(4)).map(tuple), st.integers(1, 2))
shapes = st.one_of(
    st.tuples(st.integers(1, 40), st.integers(1, 300)),
    st.tuples(st.integers(30, 60), st.integers(96, 260)),
    st.tuples(st.integers(1, 12), st.integers(1, 8), st.integers(1, 6), st.integers(1, 6)),
    st.lists(st.integers(0, 9), max_size=3).map(tuple),
    st.tuples(st.integers(0, 5000)),
)


@given(data=st.data())
def test_layout_groups_and_interruptions_change_nothing(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from((torch.float32, torch.bfloat16, torch.float16)))
    drawn = data.draw(st.lists(st.tuples(shapes, layouts, st.integers(0, 2)), min_size=1, max_size=3))
    cls, options = OPTIMIZERS[data.draw(st.sampled_from(sorted(OPTIMIZERS)))]
    widths = (4, 5, 6, 8, 32) if cls is stquant.Lion else (2, 3, 4, 5, 6, 8, 32)
    policy = stquant.Fixed(
        data.draw(st.sampled_from(widths)),
        block=data.draw(st.sampled_from((32, 64, 128))),
        flat=data.draw(st.booleans()),
    )
    options = {**options, "policy": policy, "seed": data.draw(st.integers(-(2**70), 2**70))}
    steps = data.draw(st.integers(1, 4))
    stop = data.draw(st.integers(0, steps))

    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**30)))
    values = [torch.randn(shape, generator=generator).to(dtype) for shape, _, _ in drawn]
    plain = [torch.nn.Parameter(v.clone()) for v in values]
    laid_out = [torch.nn.Parameter(layout.apply(v)) for v, (_, layout, _) in zip(values, drawn, strict=True)]
    grads = list(gradients(values, steps))

    straight = cls(plain, **options)
    run(straight, plain, grads)

    # The groups are consecutive: a state's number in the file is its parameter's place.
    ends = sorted(group for _, _, group in drawn)
    groups = [{"params": [p for p, end in zip(laid_out, ends, strict=True) if end == g]} for g in sorted(set(ends))]
    other = cls(groups, **options)
    run(other, laid_out, grads[:stop])
    file = io.BytesIO()
    torch.save(other.state_dict(), file)
    file.seek(0)
    resumed = cls([{"params": list(group["params"])} for group in groups], lr=1.0, policy="fp32")
    resumed.load_state_dict(torch.load(file))
    run(resumed, laid_out, grads[stop:])

    assert [p.stride() for p in laid_out] == [
        layout.apply(v).stride() for v, (_, layout, _) in zip(values, drawn, strict=True)
    ]
    assert same(snapshot(straight, plain), snapshot(resumed, laid_out))
