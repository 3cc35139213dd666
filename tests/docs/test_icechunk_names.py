"""The guide has every public name of icechunk, and what it says to take instead exists."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import icechunk
import pytest
import typer
from zarr.abc.store import Store

import zarr_manifests as zm
from zarr_manifests.cli import app
from zarr_manifests.store import ManifestStore

PAGE = Path(__file__).parents[2] / "docs/guide/moving-in.md"
SECTION = PAGE.read_text("utf-8").partition("\n## icechunk's names\n")[2]
ABBREVIATED = {
    "repo": zm.Repository,
    "session": zm.Session,
    "store": ManifestStore,
    "fork": zm.Fork,
    "zm": zm,
}
VERBS = {*typer.main.get_command(app).commands}
OPTIONS = set(
    re.findall(
        r"^\| `([\w.-]+)` \|", PAGE.with_name("configuration.md").read_text("utf-8"), re.MULTILINE
    )
)
"""As the guide lists them; another test compares that list with the schema."""


def rows() -> Iterator[tuple[str, str, str]]:
    """Whose names they are, the cell with the names, and the cell that says what to take."""
    owner = ""
    for line in SECTION.splitlines():
        if line.startswith("| "):
            left, right = line.strip("| ").split(" | ")
            if right == "here":
                owner = left.strip("`")
            elif owner.startswith("icechunk") and "`" in left:
                yield owner, left, right


def spans(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def found(owner: Any, dotted: str) -> Any:
    for name in dotted.split("."):
        if inspect.ismodule(owner) and not hasattr(owner, name):
            importlib.import_module(f"{owner.__name__}.{name}")
        owner = getattr(owner, name)
    return owner


def keywords(functions: list[Any]) -> set[str]:
    """All names that a keyword of one of them may have; options of places are in the guide."""
    named = {
        name for one in functions if callable(one) for name in inspect.signature(one).parameters
    }
    if zm.storage.from_url in functions:
        places = PAGE.with_name("places.md").read_text("utf-8")
        named |= set(re.findall(r"^\| `(\w+)` \| `", places, re.MULTILINE))
    return named


def class_of(owner: str) -> Any:
    return found(icechunk, owner.partition(".")[2]) if "." in owner else icechunk


def listed(owner: str) -> set[str]:
    """The names of that class that are in the tables, patterns as the names they match."""
    known = {*dir(class_of(owner))}
    texts = {text for whose, left, _ in rows() if whose == owner for text in spans(left)}
    names = {re.match(r"[\w.*]*", text)[0] for text in texts if not text.endswith("=")}
    return {name for name in known for one in names if fnmatchcase(name, one)}


def test_the_names_in_each_row_exist() -> None:
    wrong = []
    for row in rows():
        try:
            check(*row)
        except (AssertionError, AttributeError) as error:
            wrong.append((row, error))
    assert wrong == []


def check(owner: str, left: str, right: str) -> None:
    theirs = class_of(owner)
    names = [re.match(r"[\w.*]*", one)[0] for one in spans(left) if not one.endswith("=")]
    functions = [found(theirs, name) for name in names if "*" not in name]
    for name in names:
        assert "*" not in name or any(fnmatchcase(one, name) for one in dir(theirs)), name
    assert {one[:-1] for one in spans(left) if one.endswith("=")} <= keywords(functions)
    words = spans(right)
    assert words or "](" in right or right.startswith("none"), right
    ours = [text for text in words if text.partition(".")[0] in ABBREVIATED]
    functions = [found(ABBREVIATED[one.partition(".")[0]], one.partition(".")[2]) for one in ours]
    for text in set(words) - set(ours):
        if text.endswith("="):
            assert text[:-1] in keywords(functions), text
        elif text.startswith("zarr-manifests "):
            assert text.split()[1] in VERBS, text
        else:
            assert text in OPTIONS or text in {"s3://", "ancestry"}, text


@pytest.mark.parametrize(
    "owner",
    [
        "icechunk.Repository",
        "icechunk.Session",
        "icechunk.IcechunkStore",
        "icechunk.RepositoryConfig",
    ],
)
def test_no_method_is_missing(owner: str) -> None:
    public = {name for name in dir(class_of(owner)) if not name.startswith("_")}
    if owner == "icechunk.IcechunkStore":
        public -= {*dir(Store)}
    assert "For each name that ends in `_async`, and\nfor `async_ancestry`" in SECTION
    twins = {name for name in public if name.removesuffix("_async") in public - {name}}
    assert public - twins - {"async_ancestry"} - listed(owner) == set()


def test_no_name_of_the_module_is_missing() -> None:
    assert {*icechunk.__all__} - listed("icechunk") == set()
    forks = {name for name in dir(icechunk.ForkSession) if not name.startswith("_")}
    assert forks <= {*dir(icechunk.Session)}
    said = spans(SECTION[SECTION.index("A `zm.Fork`") :].partition("\n\n")[0])[1:]
    assert {one.partition(".")[2] for one in said} == {n for n in dir(zm.Fork) if n[0] != "_"}
