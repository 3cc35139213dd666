"""What long work tells of itself while it runs.

It calls a `Progress` with what it does and how many are done. Where the total is known, it tells
that before, and again if it turns out larger: of objects that lead to others, the total is of those
found so far. From these follow a rate and a time left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sized

__all__ = ["Progress", "counted", "expect", "ignore"]

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


def counted[T](
    progress: Progress, stage: str, items: Iterable[T], total: int | None = None
) -> Iterator[T]:
    """The items; of each it is told when the next one is asked for, since it is done then.

    The total is the length of `items` if it is not given and they have one.

    Examples
    --------
    >>> from zarr_manifests.progress import counted
    >>> for item in counted(print, "looking", ["a", "b"]):
    ...     print(item)
    looking 0
    a
    looking 1
    b
    looking 2
    """
    if progress is ignore:
        return iter(items)
    if total is None and isinstance(items, Sized):
        total = len(items)
    return _counted(progress, stage, items, total)


def _counted[T](
    progress: Progress, stage: str, items: Iterable[T], total: int | None
) -> Iterator[T]:
    if total is not None:
        expect(progress, stage, total)
    progress(stage, 0)
    for done, item in enumerate(items, 1):
        yield item
        progress(stage, done)


def ignore(stage: str, done: int) -> None:
    """A `progress` that tells nobody."""
