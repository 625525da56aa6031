"""Who serves the operations, and why.

One table of backends. A backend that was asked for and is missing raises; there is no silent
fallback.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from stquant.errors import BackendError
from stquant.kernels import reference
from stquant.kernels.ops import AdamRule, Item, LionRule, Packed, SGDRule
from stquant.kernels.reference.stats import StateStats


@dataclass(frozen=True, slots=True)
class Operations:
    """The functions of one backend; `reference` documents each."""

    name: str
    why: str
    decode: Callable[[Packed, Tensor], Tensor]
    encode_: Callable[[Packed, Tensor], None]
    recode_: Callable[[Packed, Packed], None]
    state_stats: Callable[[Packed], StateStats]
    adam_step_: Callable[[Sequence[Item], AdamRule], None]
    sgd_step_: Callable[[Sequence[Item], SGDRule], None]
    lion_step_: Callable[[Sequence[Item], LionRule], None]


REFERENCE = Operations(
    "reference",
    "plain torch; serves every device",
    reference.decode,
    reference.encode_,
    reference.recode_,
    reference.state_stats,
    reference.adam_step_,
    reference.sgd_step_,
    reference.lion_step_,
)

_BACKENDS = {REFERENCE.name: REFERENCE}


def resolve(name: str | None) -> Operations:
    """Return the backend called `name`, or the best of this machine if None.

    Raises:
        BackendError: There is no backend of that name.
    """
    if name is None:
        return REFERENCE
    if name not in _BACKENDS:
        raise BackendError(f"backend={name!r} is not available; use None or one of {sorted(_BACKENDS)}")
    return _BACKENDS[name]
