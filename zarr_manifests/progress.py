"""How far long work is, for whoever wants to see it.

Work tells what it does and how many are done. Where the total is known, it tells that before, and
again if it turns out larger: of objects that lead to others, the total is of those found so far.
Who listens is said by the context, so that no function passes it on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final

from zarr_manifests.errors import plain_text
from zarr_manifests.runtime import setting

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

type Progress = Callable[[str, int], None]
"""Called with what is being done, and how many of it are done."""

_TOLD: Final[ContextVar[Progress | None]] = ContextVar("told", default=None)


@contextmanager
def show_progress(told: Progress | None = None) -> Iterator[None]:
    """Show how far the work in the block is: as a bar, or by calls of a function.

    Parameters
    ----------
    told : callable, optional
        Called with what is being done, such as `"reading chunks"`, and how many are done. If it has
        a method `expect`, that is called with the same and how many there will be. By default a
        bar is drawn on standard error, if that is a terminal or a notebook.

    Examples
    --------
    >>> import zarr_manifests as zm
    >>> repo = zm.create("memory://show-progress-example")
    >>> with zm.show_progress(lambda stage, done: None):
    ...     repo.verify().ok
    True
    """
    if told is None:
        from rich import progress
        from rich.console import Console

        console = Console(stderr=True)
        columns = (
            progress.SpinnerColumn(),
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(20),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            progress.TimeRemainingColumn(),
        )
        hidden = not (console.is_terminal or console.is_jupyter)
        shown = progress.Progress(*columns, console=console, transient=True, disable=hidden)
        with shown, show_progress(_Bars(shown)):
            yield
        return
    with setting(_TOLD, told):
        yield


class _Bars:
    """Shows the stage that was told of last."""

    def __init__(self, shown: RichProgress) -> None:
        self._shown = shown
        self._tasks: dict[str, TaskID] = {}
        self._now = ""
        self._task("working")  # until the work itself says what it does

    def __call__(self, stage: str, done: int) -> None:
        self._shown.update(self._task(stage), completed=done)

    def expect(self, stage: str, total: int) -> None:
        """Show how many there will be, and so how long it takes."""
        self._shown.update(self._task(stage), total=total)

    def _task(self, stage: str) -> TaskID:
        if stage not in self._tasks:
            self._tasks[stage] = self._shown.add_task(plain_text(stage), total=None)
        if stage != self._now:
            self._now = stage
            for name, task in self._tasks.items():
                self._shown.update(task, visible=name == stage)
        return self._tasks[stage]


# --- for the work ----------------------------------------------------------------------------


def is_shown() -> bool:
    """Whether anybody listens; to count for nobody may cost more than the work."""
    return _TOLD.get() is not None


def tell(stage: str, done: int) -> None:
    """Tell how many are done."""
    told = _TOLD.get()
    if told is not None:
        with setting(_TOLD, None):  # work that it does itself tells nobody
            told(stage, done)


def expect(stage: str, total: int) -> None:
    """Tell how many there will be."""
    told = getattr(_TOLD.get(), "expect", None)
    if told is not None:
        told(stage, total)


def counted[T](stage: str, items: Iterable[T], total: int | None = None) -> Iterator[T]:
    """The items; of each it is told when the next one is asked for, since it is done then.

    The total is the length of `items` if it is not given and they have one.

    Examples
    --------
    >>> from zarr_manifests.progress import counted, show_progress
    >>> with show_progress(print):
    ...     for item in counted("looking", ["a", "b"]):
    ...         print(item)
    looking 0
    a
    looking 1
    b
    looking 2
    """
    if not is_shown():
        yield from items
        return
    if total is None and isinstance(items, Sized):
        total = len(items)
    if total is not None:
        expect(stage, total)
    tell(stage, 0)
    for done, item in enumerate(items, 1):
        yield item
        tell(stage, done)
