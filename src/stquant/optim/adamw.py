"""AdamW and Adam with packed states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from stquant.kernels.ops import AdamRule
from stquant.optim.base import PackedOptimizer
from stquant.optim.capturing import learning_rate
from stquant.optim.options import check_range, check_unsupported
from stquant.policy.policies import Policy


class Adam(PackedOptimizer):
    """Adam (Kingma and Ba, 2015) with the states `exp_avg` and `exp_avg_sq` packed.

    Positional arguments, their order, defaults and meaning are those of `torch.optim.Adam`.

    Args:
        params: Tensors, groups, or `model.named_parameters()`.
        lr: Learning rate, a float or a one-element tensor; read at each step.
        betas: Decay rates of the averages of the gradient and of its square.
        eps: Added to the denominator.
        weight_decay: Decay of the weights, added to the gradient unless `decoupled_weight_decay`.
        amsgrad: Divide by the largest average so far; with `policy="fp32"` only.
        foreach: None or False; there is no such implementation.
        maximize: Ascend instead of descend.
        capturable: Steps may be captured in a CUDA graph: step counts, and `lr` if it is a tensor, stay on the
            device; formats stay as they are. Needs Triton kernels for all parameters.
        differentiable: False; steps cannot be differentiated.
        fused: True demands compiled kernels and raises where they do not serve a parameter; None
            or False takes the best there is.
        decoupled_weight_decay: Decay the weights themselves, as AdamW.
        policy: Which formats the states have. "adaptive" packs both in 2 bits, `exp_avg` with
            prepay, and spends a quarter of a bit per element more where rounding moves the weights
            most. Others: `Budget`, `Tolerance`, `Fixed(bits=4)`, "fp32", or a
            published recipe ("bnb8", "torchao4", "flash8", "solo42", "nf4").
        master_bits: Bits of the packed residual that a bf16 parameter gets: 1 to 8 or 16; 0
            rounds it stochastically, None to nearest as torch does. "auto" is 8 for bf16 and 0
            for fp16, which takes 0 or None only. fp32 parameters have none.
        masters: Residuals to start from, by name, as `cast_model` returns them; None for zeros.
        backend: Kernels: "cpu", "reference", or None for the best of this machine.
        seed: Seed of stochastic rounding.
        process_group: Ranks with replicas of plain parameters, as under DDP; adaptive policies then
            decide on what its first rank measured. None: every rank decides for itself, and
            alike if gradients are equal to the bit. DTensors know their ranks by themselves.

    Raises:
        ValueError: An argument is out of range or not supported.
    """

    STATES = {"exp_avg": True, "exp_avg_sq": False}
    OPERATION = "adam_step_"

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        policy: Policy | str = "adaptive",
        master_bits: int | str | None = "auto",
        masters: dict[str, Tensor] | None = None,
        backend: str | None = None,
        seed: int = 0,
        process_group: Any = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
            "differentiable": differentiable,
            "fused": fused,
            "decoupled_weight_decay": decoupled_weight_decay,
        }
        super().__init__(params, defaults, policy, master_bits, masters, backend, seed, process_group)

    def _states(self, group: dict[str, Any]) -> Mapping[str, bool]:
        return {**self.STATES, "max_exp_avg_sq": False} if group["amsgrad"] else self.STATES

    def _check_options(self, group: dict[str, Any]) -> None:
        check_range("lr", float(group["lr"]), group["lr"], 0.0)
        check_range("eps", group["eps"], group["eps"], 0.0)
        check_range("weight_decay", group["weight_decay"], group["weight_decay"], 0.0)
        for beta in group["betas"]:
            check_range("betas", float(beta), group["betas"], 0.0, 1.0)
        check_unsupported(group)
        if group["amsgrad"] and any(f.packed for f in self._policy(group).formats_of(self._states(group)).values()):
            raise ValueError(
                "amsgrad=True needs policy='fp32': a running maximum of rounded averages only ever grows; "
                "use amsgrad=False or policy='fp32'"
            )

    def _rule(self, group: dict[str, Any], seed: int) -> AdamRule:
        (beta1, beta2), (lr, rate) = group["betas"], learning_rate(group)
        return AdamRule(
            lr=lr,
            betas=(float(beta1), float(beta2)),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            decoupled=group["decoupled_weight_decay"],
            maximize=group["maximize"],
            seed=seed,
            rate=rate,
        )


class AdamW(Adam):
    """AdamW (Loshchilov and Hutter, 2019): Adam that decays the weights themselves.

    Positional arguments, their order, defaults and meaning are those of `torch.optim.AdamW`; the
    others are those of `Adam`.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        policy: Policy | str = "adaptive",
        master_bits: int | str | None = "auto",
        masters: dict[str, Tensor] | None = None,
        backend: str | None = None,
        seed: int = 0,
        process_group: Any = None,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            foreach=foreach,
            maximize=maximize,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            decoupled_weight_decay=True,
            policy=policy,
            master_bits=master_bits,
            masters=masters,
            backend=backend,
            seed=seed,
            process_group=process_group,
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            # A file of Adam's may say otherwise; AdamW always decouples, as in torch.
            group["decoupled_weight_decay"] = True
