"""With what it is trained: torch's optimizers, controls, other packages as themselves, and ours."""

from __future__ import annotations

import importlib
import itertools
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import stquant
from stquant.codecs import catalog
from stquant.jobs import contenders as jobs
from stquant.jobs.workloads import Workload
from stquant.kernels import corrections, cpu
from stquant.policy.budget import Adaptive

Params = list[tuple[str, nn.Parameter]]
Make = Callable[[Params, Workload, int], torch.optim.Optimizer]

TUNED_B1 = {"gpt2": 0.5, "vit": 0.5, "clip": 0.5}
"""The best of those that `tuning` tried."""


@dataclass(frozen=True, slots=True)
class Contender:
    """One row.

    Attributes:
        kind: "fp32" (torch and controls), "rival" (another package as itself), "recipe" (a
            published recipe on our kernels) or "ours".
        make: Makes the optimizer from named parameters, the workload and the seed.
        dtype: Of the weights and gradients; the model computes in fp32.
        needs: Package that must be importable.
    """

    kind: str
    make: Make
    dtype: torch.dtype = torch.float32
    needs: str | None = None


def why_missing(contender: Contender) -> str | None:
    """Return why a contender cannot run here, or None."""
    if contender.needs is None:
        return None
    try:
        importlib.import_module(contender.needs)
    except Exception as error:  # another package may fail in any way; its row says how
        return f"{type(error).__name__}: {error}"
    return None


def _options(workload: Workload) -> dict[str, Any]:
    return {"lr": workload.lr, "betas": workload.betas, "weight_decay": workload.weight_decay}


def _named(text: str) -> Make:
    """What the command line names, see `stquant.jobs.contenders`."""
    return lambda params, workload, seed: jobs.contender(text, seed).make(params, workload)


def _ours(policy: stquant.Policy, master_bits: int) -> Make:
    return lambda params, workload, seed: stquant.AdamW(
        params,
        policy=policy() if callable(policy) else policy,
        master_bits=master_bits,
        seed=seed,
        **_options(workload),
    )


def _budget(bits: float, kind: type[stquant.Budget] = stquant.Budget) -> Make:
    """A budget under which the states that can be packed have so many true bits on average.

    What cannot be packed weighs heavily in models as small as these, so it is allowed for apart.
    """

    def make(params: Params, workload: Workload, seed: int) -> torch.optim.Optimizer:
        roomy = stquant.AdamW(params, policy=kind(bits=32.0))
        roomy.init_state()
        allowed = sum(
            row.elements * bits / 8 if row.elements and catalog.get(row.format).packed else row.bytes
            for row in roomy.ledger().rows
        )
        return stquant.AdamW(params, policy=kind(bytes=int(allowed)), seed=seed, **_options(workload))

    return make


def _with_b1(b1: float | None) -> Make:
    def make(params: Params, workload: Workload, seed: int) -> torch.optim.Optimizer:
        first = TUNED_B1[workload.name.partition("@")[0]] if b1 is None else b1
        return torch.optim.AdamW(params, **{**_options(workload), "betas": (first, workload.betas[1])})

    return make


def _foreign(module: str, name: str, **options: Any) -> Make:
    """An optimizer of another package with the arguments of AdamW."""

    def make(params: Params, workload: Workload, seed: int) -> torch.optim.Optimizer:
        kind = getattr(importlib.import_module(module), name)
        made: torch.optim.Optimizer = kind([param for _, param in params], **_options(workload), **options)
        return made

    return make


def _lion8(params: Params, workload: Workload, seed: int) -> torch.optim.Optimizer:
    kind = importlib.import_module("bitsandbytes.optim").Lion8bit
    made: torch.optim.Optimizer = kind(
        [param for _, param in params], lr=workload.lr / 5, weight_decay=5 * workload.weight_decay
    )
    return made


def _adafactor(params: Params, workload: Workload, seed: int) -> torch.optim.Optimizer:
    """With AdamW's schedule of rates instead of its own, and without momentum, as it saves memory."""
    kind = importlib.import_module("transformers").Adafactor
    fixed = {"scale_parameter": False, "relative_step": False}
    made: torch.optim.Optimizer = kind(
        [param for _, param in params], lr=workload.lr, weight_decay=workload.weight_decay, **fixed
    )
    return made


def _adam_mini(params: Params, workload: Workload, seed: int) -> torch.optim.Optimizer:
    kind = importlib.import_module("adam_mini").Adam_mini
    width = statistics.mode(param.shape[-1] for _, param in params if param.ndim == 2)
    made: torch.optim.Optimizer = kind(params, **_options(workload), dim=width, n_heads=4, verbose=False)
    return made


class QuasiHyperbolicAdam(torch.optim.AdamW):
    """fp32 AdamW whose step takes 0.7 of the momentum and 0.3 of the gradient itself.

    A control: what applying a part of the gradient at once does without any rounding (the update
    of QHAdam with nu1 = 0.7 and nu2 = 1).
    """

    NU = 0.7

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Take one step."""
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._step(param, param.grad, group)
        return loss

    def _step(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state, (b1, b2) = self.state[param], group["betas"]
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(param), exp_avg_sq=torch.zeros_like(param))
        state["step"] += 1
        m, v, t = state["exp_avg"], state["exp_avg_sq"], state["step"]
        m.mul_(b1).add_(grad, alpha=1 - b1)
        v.mul_(b2).addcmul_(grad, grad, value=1 - b2)
        moved = self.NU * m / (1 - b1**t) + (1 - self.NU) * grad
        param.mul_(1 - group["lr"] * group["weight_decay"])
        param.sub_(group["lr"] * moved / ((v / (1 - b2**t)).sqrt() + group["eps"]))


def _quasi_hyperbolic(params: Params, workload: Workload, seed: int) -> torch.optim.Optimizer:
    return QuasiHyperbolicAdam([param for _, param in params], **_options(workload))


class SpaceOnly(stquant.Budget):
    """A budget that is divided among the tensors in the first decisions and then stays as it is."""

    def due(self, step: int) -> bool:
        """Whether a parameter is measured at its own `step`: early on only."""
        return step in self._early

    def to_dict(self) -> dict[str, Any]:
        """Return the arguments that make this policy again, and its kind."""
        return {**super().to_dict(), "kind": "space only"}


stquant.register_policy("space only", lambda **data: SpaceOnly(**data))


class FromZero(Adaptive):
    """The default policy where `exp_avg_sq` may have 0 bits, and with other shares to divide.

    Args:
        share: Bits for each packed element beyond the smallest formats.
        options: As of `Adaptive`.
    """

    least_unsigned = 0

    def __init__(self, share: float, **options: Any) -> None:
        super().__init__(**options)
        self.BITS = share

    def to_dict(self) -> dict[str, Any]:
        """Return the arguments that make this policy again, and its kind."""
        return {**super().to_dict(), "kind": "from zero", "share": self.BITS}


stquant.register_policy("from zero", lambda **data: FromZero(**data))


class _PrepayingMore(stquant.AdamW):
    """AdamW whose first steps prepay (1 - b1**t)**power of the sum in docs/numerics.md, instead of its square."""

    power = 0

    def step(self, closure: Any = None) -> Any:
        """Take one step."""
        usual = corrections.prepay_table

        def table(beta: float) -> list[float]:
            return [0.0, *((1 - beta**t) ** (self.power - 2) * c for t, c in enumerate(usual(beta)[1:], 1))]

        # The kernels keep constants of a rule and a step, which others use as well.
        with mock.patch.object(corrections, "prepay_table", table):
            cpu._adam_constants.cache_clear()
            loss = super().step(closure)
        cpu._adam_constants.cache_clear()
        return loss


class _PrepayingSomeMore(_PrepayingMore):
    power = 1


def _prepaying(kind: type[stquant.AdamW]) -> Make:
    policy = stquant.Fixed(exp_avg=2, exp_avg_sq=2)
    return lambda params, workload, seed: kind(params, policy=policy, seed=seed, **_options(workload))


def _time_only(params: Params, workload: Workload, seed: int) -> torch.optim.Optimizer:
    """The same formats for all tensors: 2 + 2 bits in the first half of the run, 2 + 0 in the second."""
    policies = [stquant.Fixed(exp_avg=first, exp_avg_sq=second) for first, second in ((2, 2), (2, 0))]
    optimizer = stquant.AdamW(params, policy=policies[0], seed=seed, **_options(workload))
    steps = itertools.count(1)

    def change(*_: Any) -> None:
        if next(steps) == workload.steps // 2:
            optimizer.set_policy(policies[1])

    optimizer.register_step_post_hook(change)
    return optimizer


BF16 = torch.bfloat16
CONTENDERS = {
    "torch AdamW": Contender("fp32", _named("torch")),
    "torch NAdam": Contender("fp32", _named("nadam")),
    "torch AdamW, bf16": Contender("fp32", _named("torch"), BF16),
    "quasi-hyperbolic Adam": Contender("fp32", _quasi_hyperbolic),
    "torch AdamW, b1 0.5": Contender("fp32", _with_b1(0.5)),
    "torch AdamW, b1 0.8": Contender("fp32", _with_b1(0.8)),
    "torch AdamW, tuned b1": Contender("fp32", _with_b1(None)),
    "bitsandbytes 8-bit": Contender("rival", _foreign("bitsandbytes.optim", "AdamW8bit"), needs="bitsandbytes"),
    "bitsandbytes Lion 8-bit": Contender("rival", _lion8, needs="bitsandbytes"),
    "torchao 8-bit": Contender("rival", _foreign("torchao.optim", "AdamW8bit"), needs="torchao.optim"),
    "torchao 4-bit": Contender("rival", _foreign("torchao.optim", "AdamW4bit"), needs="torchao.optim"),
    "torchao FP8": Contender("rival", _foreign("torchao.optim", "AdamWFp8"), needs="torchao.optim"),
    "Adafactor": Contender("rival", _adafactor, needs="transformers"),
    "Adam-mini": Contender("rival", _adam_mini, needs="adam_mini"),
    "flashoptim": Contender("rival", _foreign("flashoptim", "FlashAdamW"), needs="flashoptim"),
    "SOLO": Contender("rival", _foreign("solo.adamw", "AdamWQ"), needs="solo.adamw"),
    "flash8 recipe": Contender("recipe", _named("flash8")),
    "solo42 recipe": Contender("recipe", _named("solo42")),
    "adaptive": Contender("ours", _named("adaptive")),
    "2+0 bits": Contender("ours", _named("2+0")),
    "2+1 bits": Contender("ours", _named("2+1")),
    **{f"2+0 bits and {share:g}": Contender("ours", _ours(FromZero(share), 8)) for share in (0.25, 0.5, 0.75, 1.0)},
    **{f"{text} bits": Contender("ours", _named(text)) for text in ("2+2", "2+4", "3+1", "3+2", "4+2")},
    "2+2 bits, prepaying all at once": Contender("ours", _prepaying(_PrepayingMore)),
    "2+2 bits, prepaying more": Contender("ours", _prepaying(_PrepayingSomeMore)),
    "4 bits": Contender("ours", _named("4")),
    **{f"budget {bits:g} bits": Contender("ours", _budget(bits)) for bits in (1.5, 2.0, 3.0, 5.0)},
    "space only": Contender("ours", _budget(2.0, SpaceOnly)),
    "time only": Contender("ours", _time_only),
    "8 bits": Contender("ours", _named("8")),
    "2+0 bits, bf16, 8-bit residual": Contender("ours", _ours(stquant.Fixed(exp_avg=2, exp_avg_sq=0), 8), BF16),
    "2+0 bits, bf16, 4-bit residual": Contender("ours", _ours(stquant.Fixed(exp_avg=2, exp_avg_sq=0), 4), BF16),
}
