"""What notebooks show: every value as HTML, harmless, folded, and bounded."""

from __future__ import annotations

import builtins
from html.parser import HTMLParser
from typing import Any

import pytest
import zarr

import zarr_manifests as zm
from zarr_manifests import reports
from zarr_manifests.storage.memory import MemoryStorage

EVIL = "<script>alert('&\")</script>\x1b[2J\u202e\n</style></details>"
TAGS = {"pre", "span"}
ATTRIBUTES = {"style"}


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


def test_reports_without_words_are_their_tables_in_text() -> None:
    """And no dump of objects; what says nothing of itself for once is still shown."""
    repo = zm.create(MemoryStorage())
    with repo.transaction(message="air") as store:
        zarr.create_array(store, name="air", shape=(8,), chunks=(2,), dtype="i4")[:] = 1
    usage = str(repo.du()).splitlines()
    assert usage[0].startswith("total        4 chunks, ")
    assert [line.split()[0] for line in usage[-2:]] == ["path", "/air"]
    for report, said in (
        (repo.compute_statistics(), "measured     4"),
        (repo.compact(), "mode"),
        (zm.clone(repo, MemoryStorage()), "objects"),
    ):
        text = str(report)
        assert said in text
        assert type(report).__name__ not in text
        assert all(line.isprintable() and line == line.rstrip() for line in text.splitlines())
    assert str(reports.CollectionReport()) == repr(reports.CollectionReport())


def test_what_a_repository_returns_is_shown() -> None:
    repo = zm.create(MemoryStorage())
    with repo.transaction(message=EVIL, metadata={"by": EVIL}) as store:
        zarr.create_array(store, name="air", shape=(8,), chunks=(2,), dtype="i4")[:] = 1
    session = repo.writable_session()
    zarr.open_array(session.store, path="air")[:2] = 5
    zarr.create_group(session.store, path="sea")
    status = shown(session.status())
    assert "+ /sea" in status.text
    session.commit("correct it")
    (info, *_) = repo.ancestry()
    for value in (info, repo.diff("main~1", "main"), repo.du(), repo.du()["air"]):
        found = shown(value)
        assert type(value).__name__ in found.text
    assert "1 chunk: (0,)" in shown(repo.diff("main~1", "main")).text
    assert "4 chunks" in shown(repo.du()).text
    assert "no changes" in shown(repo.diff("main", "main")).text
    for report in (repo.compact(), repo.verify(), repo.compute_statistics()):
        assert type(report).__name__ in shown(report).text


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
    assert found.text.count("●") == 4
    for text in ("merge side", "on side <script>", "on main <script>", "tag v1", "create repo"):
        assert text in found.text
    assert next(history).message == "merge side"
    assert shown(history).text.count("●") == 4
    assert [info.message for info in history] == [f"on main {EVIL}", "create repository"]
    assert "older" not in found.text
    assert "older" in shown(repo.ancestry(limit=1)).text


def test_what_is_long_is_cut_and_says_so() -> None:
    array = reports.StatisticsReport("/a", 1, 1, 0)
    found = shown(reports.StatisticsReport("", 0, 0, 0, arrays=(array,) * 5000))
    assert found.text.count("/a") == 200
    assert "... and 4,800 more" in found.text
    assert "arrays (5,000)" in found.text
    assert "x" * 400 not in shown(reports.StatisticsReport("x" * 10_000, 1, 1, 0)).text


def test_a_value_is_shown_once_in_a_notebook(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """There, a console of rich shows what it draws by itself."""
    notebook = type("ZMQInteractiveShell", (), {})
    monkeypatch.setattr(builtins, "get_ipython", notebook, raising=False)
    shown(zm.create(MemoryStorage()))
    assert capsys.readouterr().out == ""
