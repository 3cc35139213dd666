"""Progress of long work on one line of a terminal: how much is done, how fast, how much longer."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Self

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar as Bar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

__all__ = ["ProgressBar"]

_BAR_WIDTH: Final = 20


@dataclass(slots=True)
class _Stage:
    """What is being done, since when, and how much of it."""

    name: str
    since: float
    first: int = 0
    """How many were done at that time."""
    done: int = 0
    total: int | None = None

    def rate(self, now: float) -> float:
        """How many are done in a second; 0 if that is not known yet."""
        return (self.done - self.first) / (now - self.since) if now > self.since else 0.0

    def counts(self, now: float) -> str:
        """`1,200 of 4,000, 85/s`, or `1,200 so far, 85/s`; empty before there is a number."""
        if not self.done and self.total is None:
            return ""
        text = f"{self.done:,} so far" if self.total is None else f"{self.done:,} of {self.total:,}"
        rate = self.rate(now)
        if rate:
            text += f", {rate:,.0f}/s" if rate >= 10 else f", {rate:.2g}/s"
        return text

    def times(self, now: float) -> str:
        """`1:05 left`, or for how long it has been done if that is not known."""
        rate = self.rate(now)
        if not rate or self.total is None:
            return _clock(now - self.since)
        return f"{_clock(max(self.total - self.done, 0) / rate)} left"


@dataclass(slots=True)
class ProgressBar:
    """A `progress` callable of the library that draws a bar; quiet if there is no terminal.

    Parameters
    ----------
    console : Console
        Where to draw; what was drawn is removed at the end.
    what : str
        What is being done, until the work says it.

    Examples
    --------
    >>> import io
    >>> from rich.console import Console
    >>> from zarr_manifests.cli.progress_bar import ProgressBar
    >>> file = io.StringIO()
    >>> with ProgressBar(Console(file=file), "verifying") as bar:
    ...     bar("reading chunks", 3)
    >>> file.getvalue()
    ''
    """

    console: Console
    what: str
    _stages: dict[str, _Stage] = field(init=False, default_factory=dict)
    _now: _Stage = field(init=False)
    _live: Live = field(init=False)
    _spinner: Spinner = field(init=False)

    def __post_init__(self) -> None:
        self._now, self._spinner = self._at(self.what), Spinner("dots")
        self._live = Live(
            get_renderable=self._line, console=self.console, transient=True, refresh_per_second=10
        )

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._live.stop()

    def __call__(self, stage: str, done: int) -> None:
        """Show that so many are done of what is being done; fewer than before is a new start."""
        now = self._at(stage, done)
        if done < now.done:
            now.first, now.since = done, self.console.get_time()
        now.done = done
        self._now = now

    def expect(self, stage: str, total: int) -> None:
        """Show how many there will be, and so how long it takes."""
        self._now = self._at(stage)
        self._now.total = total

    def _at(self, name: str, first: int = 0) -> _Stage:
        if name not in self._stages:
            self._stages[name] = _Stage(name, self.console.get_time(), first)
        return self._stages[name]

    def _line(self) -> Table:
        """What is drawn: only the latest stage."""
        stage, now = self._now, self.console.get_time()
        line = Table.grid(padding=(0, 1))
        done = stage.done if stage.total is None else min(stage.done, stage.total)
        line.add_row(
            self._spinner,
            Text(stage.name),
            Bar(stage.total, done, width=_BAR_WIDTH, pulse=stage.total is None),
            Text(stage.counts(now), no_wrap=True),
            Text(stage.times(now), no_wrap=True),
        )
        return line


def _clock(seconds: float) -> str:
    """`1:05`, `2:00:00`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
