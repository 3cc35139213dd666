"""A bound on the memory that untrusted references may take: bytes are counted before allocation.

A few thousand bytes of references can expand to gigabytes: by templates, generated references and
compressed columns. Everything an import reads, makes and keeps counts against one bound.
"""

from __future__ import annotations

from typing import Final

from zarr_manifests.errors import InvalidArgumentError

__all__ = ["MAX_BYTES", "MAX_REFERENCES", "Budget", "check_bound"]

MAX_BYTES: Final = 1 << 30
MAX_REFERENCES: Final = 1 << 20


class Budget:
    """The bytes that an import may still allocate.

    Parameters
    ----------
    max_bytes : int
        The total number of bytes.

    Raises
    ------
    InvalidArgumentError
        If it is not a positive whole number.

    Examples
    --------
    >>> from zarr_manifests.virtual.budget import Budget
    >>> budget = Budget(100)
    >>> budget.take(60, "a document")
    >>> budget.left
    40
    """

    __slots__ = ("_most", "left")

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._most = self.left = check_bound("max_bytes", max_bytes)

    def take(self, nbytes: int, what: str) -> None:
        """Count bytes that will be made and kept; raise if they are too many."""
        self.check(nbytes, what)
        self.left -= nbytes

    def check(self, nbytes: int, what: str) -> None:
        """Raise if so many bytes cannot be used temporarily."""
        if nbytes > self.left:
            raise InvalidArgumentError(
                f"what is imported takes more than {self._most} bytes of memory, at {what}: pass "
                "a larger max_bytes= if you trust it and have that much"
            )


def check_bound(name: str, given: object) -> int:
    """Return the bound if it is a positive whole number.

    Raises
    ------
    InvalidArgumentError
        If it is not.
    """
    if not isinstance(given, int) or isinstance(given, bool) or given <= 0:
        raise InvalidArgumentError(f"{name} must be a positive whole number, not {given!r}")
    return given
