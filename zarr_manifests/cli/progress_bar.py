"""Progress of long work on one line of a terminal: how much is done, how fast, how much longer."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

__all__ = ["ProgressBar"]


class _Done(ProgressColumn):
    """`1,200 of 4,000 objects, 85/s`; nothing before the first is done."""

    def __init__(self, unit: str) -> None:
        super().__init__()
        self._unit = unit

    def render(self, task: Task) -> Text:
        if not task.completed and task.total is None:
            return Text()
        of = "" if task.total is None else f" of {task.total:,.0f}"
        text = f"{task.completed:,.0f}{of} {self._unit}"
        speed = task.speed
        if speed:
            text += f", {speed:,.0f}/s" if speed >= 10 else f", {speed:.2g}/s"
        return Text(text)


class ProgressBar:
    """A `progress` callable of the library that draws a bar; quiet if there is no terminal.

    Parameters
    ----------
    console : Console
        Where to draw; what was drawn is removed at the end.
    what : str
        What is being done, until the work says it.
    unit : str
        What is counted.

    Examples
    --------
    >>> import io
    >>> from rich.console import Console
    >>> from zarr_manifests.cli.progress_bar import ProgressBar
    >>> file = io.StringIO()
    >>> with ProgressBar(Console(file=file), "verifying", "objects") as bar:
    ...     bar("reading chunks", 3)
    >>> file.getvalue()
    ''
    """

    def __init__(self, console: Console, what: str, unit: str) -> None:
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            _Done(unit),
            TimeElapsedColumn(),
            TimeRemainingColumn(compact=True),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._stage = what
        self._tasks = {what: self._bar.add_task(what, total=None)}

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def __call__(self, stage: str, done: int) -> None:
        """Show that so many are done of what is being done."""
        self._bar.update(self._at(stage), completed=done)

    def expect(self, stage: str, total: int) -> None:
        """Show how many there will be, and so how long it takes."""
        self._bar.update(self._at(stage), total=total)

    def _at(self, stage: str) -> TaskID:
        """The task of the stage; only the latest one is shown."""
        if stage not in self._tasks:
            self._tasks[stage] = self._bar.add_task(stage, total=None, visible=False)
        if stage != self._stage:
            self._bar.update(self._tasks[self._stage], visible=False)
            self._bar.update(self._tasks[stage], visible=True)
            self._stage = stage
        return self._tasks[stage]
