"""What long work tells of itself while it runs."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Progress", "expect", "ignore"]

type Progress = Callable[[str, int], None]
"""Called with what is being done, and how many of it are done."""


def expect(progress: Progress, stage: str, total: int) -> None:
    """Tell how many there will be, if the callable has a method `expect` for that.

    Examples
    --------
    >>> from zarr_manifests.progress import expect
    >>> class Told:
    ...     def __call__(self, stage: str, done: int) -> None: ...
    ...     def expect(self, stage: str, total: int) -> None:
    ...         print(stage, total)
    >>> expect(Told(), "reading chunks", 12)
    reading chunks 12
    >>> expect(lambda stage, done: None, "reading chunks", 12)
    """
    told = getattr(progress, "expect", None)
    if told is not None:
        told(stage, total)


def ignore(stage: str, done: int) -> None:
    """A `progress` that tells nobody."""
