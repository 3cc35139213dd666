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
from zarr.abc.store import Store

import zarr_manifests as zm
from zarr_manifests.store import ManifestStore

PAGE = Path(__file__).parents[2] / "docs/icechunk-names.md"
SECTION = PAGE.read_text("utf-8")
ABBREVIATED = {
    "repo": zm.Repository,
    "session": zm.Session,
    "store": ManifestStore,
    "fork": zm.Fork,
    "zm": zm,
}


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
    for name in names:
        assert "*" not in name or any(fnmatchcase(one, name) for one in dir(theirs)), name
        assert "*" in name or found(theirs, name) is not None
    assert spans(right) or "](" in right or right.startswith("none"), right
    for text in spans(right):
        place, _, name = text.partition(".")
        if place in ABBREVIATED:
            found(ABBREVIATED[place], name)


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
