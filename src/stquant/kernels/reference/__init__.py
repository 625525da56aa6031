"""The truth: every operation in plain torch, slow and clear, on any device.

Other backends are held to it bit for bit. It works through a parameter piece by piece, so that
the extra memory of a step is a constant. Two habits keep it reproducible: plain `*`, `+`, `/`
(torch's `lerp`, `addcmul` and `alpha=` fuse roundings), and square roots through double (torch's
own in fp32 is not correctly rounded on CPUs).
"""

from stquant.kernels.reference.adam import adam_step_
from stquant.kernels.reference.codec import decode, encode_, recode_
from stquant.kernels.reference.lion import lion_step_
from stquant.kernels.reference.measurement import measure
from stquant.kernels.reference.sgd import sgd_step_
from stquant.kernels.reference.stats import state_stats

__all__ = ["adam_step_", "decode", "encode_", "lion_step_", "measure", "recode_", "sgd_step_", "state_stats"]
