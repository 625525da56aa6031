"""The exceptions that a user may want to catch.

Every message says what was given, what is allowed and what to do.
"""

import difflib
from collections.abc import Iterable


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


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: the known ones that look like it, if there are any."""
    near = difflib.get_close_matches(given, sorted(known), n=2)
    return f"; did you mean {' or '.join(near)}?" if near else ""
