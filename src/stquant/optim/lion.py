"""Lion with a packed momentum."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from stquant.kernels.ops import LionRule
from stquant.optim.base import PackedOptimizer
from stquant.optim.capturing import learning_rate
from stquant.optim.options import check_prepay, check_range, check_unsupported
from stquant.policy.policies import Policy


class Lion(PackedOptimizer):
    """Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023).

    Args:
        params: Tensors, groups, or `model.named_parameters()`.
        lr: Learning rate, a float or a one-element tensor; read at each step.
        betas: Weight of `exp_avg` in the update, and its decay rate.
        weight_decay: Decay of the weights themselves.
        maximize: Ascend instead of descend.
        foreach: None or False; there is no such implementation.
        capturable: Steps may be captured in a CUDA graph: step counts, and `lr` if it is a tensor, stay on the
            device; formats stay as they are. Needs Triton kernels for all parameters.
        differentiable: False; steps cannot be differentiated.
        fused: True demands compiled kernels and raises where they do not serve a parameter; None
            or False takes the best there is.
        policy: Format of `exp_avg`. "adaptive" is 6 bits, and a quarter of a bit per element more
            where rounding turns most signs. Others: `Budget`, `Tolerance`, `Fixed(bits=8)`, "fp32",
            or a published recipe. Formats with prepay raise: nothing can be paid in advance to a sign.
        master_bits: Bits of the packed residual of bf16 parameters, as in `AdamW`.
        masters: Residuals to start from, by name, as `cast_model` returns them; None for zeros.
        backend: Kernels: "cpu", "reference", or None for the best of this machine.
        seed: Seed of stochastic rounding.
        process_group: Ranks with replicas of plain parameters, as under DDP; adaptive policies then
            decide on what its first rank measured. None: every rank decides for itself, and
            alike if gradients are equal to the bit. DTensors know their ranks by themselves.

    Raises:
        ValueError: An argument is out of range or not supported.
    """

    STATES = {"exp_avg": True}
    PLAIN_BITS = 6  # fewer do not follow an average that moves by 1 % a step; measured in docs/numerics.md
    OPERATION = "lion_step_"

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0,
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
        defaults = {
            "lr": lr,
            "betas": betas,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
            "differentiable": differentiable,
            "fused": fused,
        }
        super().__init__(params, defaults, policy, master_bits, masters, backend, seed, process_group)

    def _check_options(self, group: dict[str, Any]) -> None:
        for name in ("lr", "weight_decay"):
            check_range(name, float(group[name]), group[name], 0.0)
        for beta in group["betas"]:
            check_range("betas", float(beta), group["betas"], 0.0, 1.0)
        check_unsupported(group)
        check_prepay(self._policy(group), self.STATES, "the sign update of Lion")

    def _prepays(self, group: dict[str, Any]) -> bool:
        return False

    def _rule(self, group: dict[str, Any], seed: int) -> LionRule:
        (beta1, beta2), (lr, rate) = group["betas"], learning_rate(group)
        return LionRule(
            lr=lr,
            betas=(float(beta1), float(beta2)),
            weight_decay=float(group["weight_decay"]),
            maximize=group["maximize"],
            seed=seed,
            rate=rate,
        )
