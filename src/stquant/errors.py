"""The exceptions that a user may want to catch.

Every message says what was given, what is allowed and what to do.
"""


class StquantError(Exception):
    """Base of the exceptions that only this library raises."""


class AgreementError(StquantError, RuntimeError):
    """Ranks that must hold equal values do not."""


class BackendError(StquantError, RuntimeError):
    """A backend was asked for that does not serve this machine."""


class CheckpointError(StquantError, ValueError):
    """A state dict cannot be loaded; the optimizer was left unchanged."""


class FormatError(StquantError, ValueError):
    """A format is unknown, or cannot store the state it was chosen for."""


class BudgetError(StquantError, ValueError):
    """A budget is smaller than the least that the states can take."""
