"""torchtitan: a container of optimizers that knows those of this library by name.

torchtitan makes optimizers from names in its configuration, of a list that only a subclass extends;
the method that does so is not documented, and is that of torchtitan 0.3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch.optim import Optimizer

from stquant.integrations.extras import needs
from stquant.optim.adamw import Adam, AdamW
from stquant.optim.lion import Lion
from stquant.optim.sgd import SGD

with needs("torchtitan", "torchtitan"):
    from torchtitan.components.optimizer import OptimizersContainer

NAMES: dict[str, Callable[..., Optimizer]] = {
    "stquant.AdamW": AdamW,
    "stquant.Adam": Adam,
    "stquant.SGD": SGD,
    "stquant.Lion": Lion,
}
"""Names that a configuration may use beside torchtitan's own."""


class PackedOptimizersContainer(OptimizersContainer):  # type: ignore[misc]  # torchtitan is not typed for mypy
    """torchtitan's container, for `optimizer_name="stquant.AdamW"` and the other `NAMES`.

    ```python
    optimizer=PackedOptimizersContainer.Config(
        implementation="for-loop",
        param_groups=[
            ParamGroupConfig(pattern=".*", optimizer_name="stquant.AdamW", optimizer_kwargs={"lr": 3e-4}),
        ],
        optimizer_factory_kwargs_by_name={"stquant.AdamW": {"policy": stquant.Budget(bits=3.0)}},
    )
    ```

    A policy given so is shared by the groups; one in `optimizer_kwargs` is a group's own, as its budget is.
    With torchtitan's default, `implementation="fused"`, an optimizer raises where no compiled
    kernels serve, and with `"foreach"` always.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):  # type: ignore[misc]
        """The fields of torchtitan's."""

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., Optimizer]:
        known: Callable[[str], Callable[..., Optimizer]] = OptimizersContainer._resolve_optimizer_factory
        return NAMES[name] if name in NAMES else known(name)
