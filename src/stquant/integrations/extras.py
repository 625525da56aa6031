"""Optional packages: a missing one says which extra of this library brings it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needs(package: str, install: str) -> Iterator[None]:
    """Guard imports of an optional package.

    Args:
        package: What is imported.
        install: What to give to `pip install` if it is missing.

    Raises:
        ImportError: The package is missing; says how to install it.
    """
    try:
        yield
    except ImportError as error:
        raise ImportError(
            f"{package} cannot be imported ({error}); pip install '{install}'", name=error.name
        ) from error
