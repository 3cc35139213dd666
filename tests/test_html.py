"""What notebooks show: every value as HTML, harmless, folded, and bounded."""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from enum import Enum
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest
import zarr

import zarr_manifests as zm
from zarr_manifests import reports
from zarr_manifests.conflicts import Conflict
from zarr_manifests.grid import IndexArray
from zarr_manifests.markup import cell, folded, page, size_text, table
from zarr_manifests.repository import build_index
from zarr_manifests.storage.memory import MemoryStorage

EVIL = "<script>alert('&\")</script>\x1b[2J\u202e\n</style></details>"
TAGS = {
    "style", "div", "span", "code", "pre", "details", "summary", "table", "thead", "tbody", "tr",
    "th", "td", "svg", "line", "circle", "rect",
}  # fmt: skip
ATTRIBUTES = {
    "class", "open", "width", "height", "overflow", "aria-hidden", "x", "y", "x1", "x2", "y1", "y2",
    "cx", "cy", "r", "fill", "stroke", "stroke-width", "viewbox", "preserveaspectratio",
    "shape-rendering",
}  # fmt: skip


class Checked(HTMLParser):
    """Parts of pages that only our own tags and attributes make, each closed where it belongs."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in TAGS
        assert {name for name, _ in attrs} <= ATTRIBUTES
        self.tags.append(tag)
        self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.text += data


def shown(value: Any) -> Checked:
    html = value._repr_html_()
    assert all(line.isprintable() for line in html.split("\n"))
    return Checked(html)


def hostile(kind: Any, depth: int = 0) -> Any:
    """A value of that type in which every text is hostile."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if isinstance(kind, typing.TypeAliasType):
        if kind is IndexArray:
            return np.arange(12).reshape(6, 2)
        return hostile(kind.__value__, depth)
    if origin in (types.UnionType, typing.Union):
        return hostile(inner[0], depth)
    if origin is tuple:
        one = hostile(inner[0], depth + 1)
        return (one,) * 3 if inner[-1] is Ellipsis else tuple(hostile(i, depth + 1) for i in inner)
    if origin in (dict, Mapping):
        return {hostile(inner[0], depth + 1): hostile(inner[1], depth + 1)}
    plain: dict[Any, Callable[[], Any]] = {
        str: lambda: EVIL,
        Any: lambda: EVIL,
        int: lambda: 12_345_678,
        bool: lambda: True,
        float: lambda: 2.5,
        datetime: lambda: datetime(2026, 1, 1, tzinfo=UTC),
        range: lambda: range(4),
    }
    if kind in plain:
        return plain[kind]()
    if issubclass(kind, Enum):
        return next(iter(kind))
    if kind is reports.SnapshotInfo:
        return snapshot()
    if kind is Conflict:
        return Conflict("chunk", EVIL, EVIL, EVIL, ((1, 2),))
    hints = typing.get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind)]
    return kind(**{name: hostile(hints[name], depth + 1) for name in names})


def snapshot() -> reports.SnapshotInfo:
    repo = zm.create(MemoryStorage())
    with repo.transaction(message=EVIL, metadata={EVIL: EVIL}) as store:
        zarr.create_group(store)
    return next(repo.ancestry())


SHOWN = [
    kind
    for name in reports.__all__
    if dataclasses.is_dataclass(kind := getattr(reports, name))
    and kind.__module__.startswith(f"{reports.__name__}.")
    and kind is not reports.ChunkSelection  # its picture has tests of its own
]


@pytest.mark.parametrize("kind", SHOWN, ids=lambda kind: kind.__name__)
def test_every_value_is_shown_and_hostile_text_in_it_is_text(kind: type) -> None:
    value = hostile(kind)
    found = shown(value)
    assert kind.__name__ in found.text
    assert ("<script>alert('&\")</script>" in found.text) == ("<script>" in repr(value))


def test_what_a_repository_returns_is_shown() -> None:
    repo = zm.create(MemoryStorage())
    with repo.transaction(message=EVIL, metadata={"by": EVIL}) as store:
        zarr.create_array(store, name="air", shape=(8,), chunks=(2,), dtype="i4")[:] = 1
    session = repo.writable_session()
    zarr.open_array(session.store, path="air")[:2] = 5
    zarr.create_group(session.store, path="sea")
    status = shown(session.status())
    assert "created (1)" in status.text
    assert "/sea" in status.text
    session.commit("correct it")
    (info, *_) = repo.ancestry()
    for value in (info, repo.diff("main~1", "main"), repo.du(), repo.du()["air"]):
        found = shown(value)
        assert type(value).__name__ in found.text
    assert "1: (0,)" in shown(repo.diff("main~1", "main")).text
    assert "4 chunks" in shown(repo.du()).text
    assert shown(repo.diff("main", "main")).text == "Diffnothing"
    for report in (repo.compact(), repo.verify(), build_index(repo), repo.compute_statistics()):
        assert "details" in shown(report).tags or "table" in shown(report).tags


def test_history_is_a_graph_and_stays_an_iterator() -> None:
    repo = zm.create(MemoryStorage())
    repo.create_branch("side")
    for branch in ("main", "side"):
        with repo.transaction(branch, message=f"on {branch} {EVIL}") as store:
            zarr.create_group(store, path=branch)
    repo.merge("side", message="merge side")
    repo.create_tag("v1")
    history = repo.ancestry()
    found = shown(history)
    assert found.tags.count("svg") == found.tags.count("circle") == 4
    for text in ("merge side", "on side <script>", "on main <script>", "tag v1", "create repo"):
        assert text in found.text
    assert next(history).message == "merge side"
    assert shown(history).tags.count("circle") == 2
    assert [info.message for info in history] == [f"on main {EVIL}", "create repository"]
    assert next(history, None) is None
    assert shown(history).text == "History"
    limited = repo.ancestry(limit=1)
    assert shown(limited).tags.count("svg") == 1 + 2  # what was merged is shown whole
    assert len([*limited]) == 1


def test_history_is_shown_although_what_was_merged_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    repo = zm.create(MemoryStorage())
    gone = f"{7:012d}-{7:024x}-1"
    with repo.transaction(message="pretends a merge", metadata={"merged-from": gone}) as store:
        zarr.create_group(store)
    history = repo.ancestry()
    assert "pretends a merge" in shown(history).text
    repo.storage.delete_many(["current"])
    assert "pretends a merge" in shown(history).text
    assert len([*history]) == 2


def test_what_is_long_is_cut_and_says_so() -> None:
    long = reports.Diff(tuple(f"/{i}" for i in range(5000)), (), (), {})
    found = shown(long)
    assert found.tags.count("tr") == 200
    assert "... and 4,800 more" in found.text
    assert "created (5,000)" in found.text
    one = reports.Amount(1, 999_999)
    usage = reports.Usage("id", (reports.ArrayUsage("/a", one, one),) * 300, one, one)
    assert "... and 100 more" in shown(usage).text
    assert "x" * 400 not in shown(reports.Status(("x" * 10_000,), (), (), {})).text


def test_html_takes_its_colors_from_the_page() -> None:
    html = page("title", folded("part", table([("cell",)]), is_open=True))
    style = re.findall(r"<style>(.*?)</style>", html)[0]
    for theme in ("--jp-border-color2", "--vscode-editorWidget-border"):
        assert theme in style
    assert not re.search(r"(?<![-\w])color:\s*(#|rgb|black|white)", style)  # text inherits
    assert "style=" not in html
    assert html.count("<details") == html.count("<summary") == 1


def test_numbers_of_numpy_are_numbers() -> None:
    values = np.int64(5_000), np.bool_(True), np.float32(0.5), np.zeros((), np.int8)
    assert [cell("count", value) for value in values] == ["5,000", "yes", "0.5", "0"]


def test_sizes_are_said_twice_where_they_are_long() -> None:
    assert [size_text(n) for n in (0, 999, 1000, 10**9, -25)] == [
        "0 bytes",
        "999 bytes",
        "1,000 bytes (1.00 kB)",
        "1,000,000,000 bytes (1.00 GB)",
        "-25 bytes",
    ]
