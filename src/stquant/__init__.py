"""STQuant: drop-in optimizers for torch whose states are packed into few bits."""

from stquant.codecs.catalog import formats
from stquant.errors import AgreementError, BackendError, BudgetError, CheckpointError, FormatError, StquantError
from stquant.optim.adamw import Adam, AdamW
from stquant.optim.lion import Lion
from stquant.optim.masters import cast_model, export_fp32
from stquant.optim.release import release_gradients
from stquant.optim.sgd import SGD
from stquant.policy.budget import Budget, Tolerance
from stquant.policy.policies import Fixed, Policy, register_policy
from stquant.report import memory

__version__ = "0.1.0"

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "AgreementError",
    "BackendError",
    "Budget",
    "BudgetError",
    "CheckpointError",
    "Fixed",
    "FormatError",
    "Lion",
    "Policy",
    "StquantError",
    "Tolerance",
    "cast_model",
    "export_fp32",
    "formats",
    "memory",
    "register_policy",
    "release_gradients",
]
