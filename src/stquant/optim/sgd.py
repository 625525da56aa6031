"""SGD with a packed momentum."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from stquant.kernels.ops import SGDRule
from stquant.optim.base import PackedOptimizer
from stquant.optim.options import check_prepay, check_range, check_unsupported
from stquant.policy.policies import Policy


class SGD(PackedOptimizer):
    """Stochastic gradient descent with the state `momentum_buffer` packed.

    Positional arguments, their order, defaults and meaning are those of `torch.optim.SGD`. A
    format with prepay applies what the rounding drops at once, `momentum / (1 - momentum)` times
    (nesterov: `momentum**2 / (1 - momentum)`), which is what it would have moved the weight by.

    Args:
        params: Tensors, groups, or `model.named_parameters()`.
        lr: Learning rate, a float or a one-element tensor; read at each step.
        momentum: Decay rate of the momentum; 0 keeps no state.
        dampening: Share of the gradient that does not enter the momentum.
        weight_decay: Decay of the weights, added to the gradient.
        nesterov: Nesterov momentum; needs a momentum and no dampening.
        maximize: Ascend instead of descend.
        foreach: None or False; there is no such implementation.
        differentiable: False; steps cannot be differentiated.
        fused: True demands compiled kernels and raises where they do not serve a parameter; None
            or False takes the best there is.
        policy: Format of the momentum. "adaptive" is 2 bits with prepay, and a quarter of a bit
            per element more where rounding moves the weights most. Others: `Budget`, `Tolerance`,
            `Fixed(bits=4)`, "fp32", or a published recipe.
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

    STATES = {"momentum_buffer": True}
    OPERATION = "sgd_step_"

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
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
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
            "foreach": foreach,
            "differentiable": differentiable,
            "fused": fused,
        }
        super().__init__(params, defaults, policy, master_bits, masters, backend, seed, process_group)

    def _states(self, group: dict[str, Any]) -> Mapping[str, bool]:
        return self.STATES if group["momentum"] else {}

    def _check_options(self, group: dict[str, Any]) -> None:
        for name in ("lr", "momentum", "weight_decay"):
            check_range(name, float(group[name]), group[name], 0.0)
        if group["nesterov"] and (group["momentum"] <= 0 or group["dampening"] != 0):
            raise ValueError(
                f"nesterov=True was given with momentum={group['momentum']!r} and dampening={group['dampening']!r}; "
                "it needs a momentum above 0 and dampening 0"
            )
        check_unsupported(group)
        if group["momentum"] >= 1:
            check_prepay(self._policy(group), self._states(group), f"momentum={group['momentum']!r}")

    def _prepays(self, group: dict[str, Any]) -> bool:
        return bool(group["momentum"] < 1)

    def _rule(self, group: dict[str, Any], seed: int) -> SGDRule:
        return SGDRule(
            lr=float(group["lr"]),
            momentum=float(group["momentum"]),
            dampening=float(group["dampening"]),
            weight_decay=float(group["weight_decay"]),
            nesterov=group["nesterov"],
            maximize=group["maximize"],
            seed=seed,
        )
