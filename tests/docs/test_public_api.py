"""What is public is listed, documented, and as documented."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAliasType

import pytest
from typer.main import get_group

import zarr_manifests
from storages import WrappedStorage
from zarr_manifests import Repository, Session
from zarr_manifests.cli import app
from zarr_manifests.storage import Storage
from zarr_manifests.storage.disk import PosixDisk
from zarr_manifests.storage.protocol import ReadsInto

REFERENCE = Path(__file__).parents[2] / "docs/reference"
PUBLIC = [
    "zarr_manifests",
    "zarr_manifests.bulk",
    "zarr_manifests.spark",
    "zarr_manifests.spark.maintenance",
    "zarr_manifests.serving",
    "zarr_manifests.errors",
    "zarr_manifests.storage",
    "zarr_manifests.virtual",
]


def public_objects() -> Iterator[tuple[str, Any]]:
    """Every public object by its name, such as `zarr_manifests.Session`."""
    for name in PUBLIC:
        module = importlib.import_module(name)
        for member in module.__all__:
            yield f"{name}.{member}", getattr(module, member)


def own_members(kind: type) -> Iterator[tuple[str, Any]]:
    """The public methods and properties that a class defines itself."""
    for name, value in vars(kind).items():
        if isinstance(value, staticmethod | classmethod):
            value = value.__func__
        if not name.startswith("_") and (inspect.isfunction(value) or isinstance(value, property)):
            yield name, value


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_module_has_a_page_of_its_docstrings(name: str) -> None:
    page = REFERENCE / f"{name.rpartition('.')[2]}.md"
    assert page.read_text(encoding="utf-8") == f"# {name}\n\n::: {name}\n"


def test_no_page_of_docstrings_is_empty() -> None:
    """The site shows what a module's `__all__` names."""
    pages = "".join(page.read_text(encoding="utf-8") for page in REFERENCE.glob("*.md"))
    for name in re.findall(r"^::: (\S+)$", pages, re.MULTILINE):
        assert importlib.import_module(name).__all__


def has_docstring(kind: type | None, name: str, value: Any) -> bool:
    doc = inspect.getdoc(value) or (kind and inspect.getdoc(getattr(kind, name)))
    # What keeps a protocol of storages is documented there.
    protocols = [each for each in (Storage, ReadsInto, PosixDisk) if hasattr(each, name)]
    docs = [doc, *(inspect.getdoc(getattr(each, name)) for each in protocols)]
    return any((each or "").strip() for each in docs)


def test_everything_public_has_a_docstring() -> None:
    missing = []
    for name, value in public_objects():
        if isinstance(value, TypeAliasType) or not callable(value):
            continue
        if not (value.__doc__ or "").strip():
            missing.append(name)
        if inspect.isclass(value):
            for kind in value.__mro__:
                if kind.__module__.startswith("zarr_manifests"):
                    members = own_members(kind)
                    missing += [f"{name}.{m}" for m, v in members if not has_docstring(kind, m, v)]
    assert missing == []


def test_public_classes_stand_alone() -> None:
    """No base class of our own, but of errors, of protocols, and of wrappers of storages."""
    found = set()
    for name, kind in public_objects():
        is_protocol = getattr(kind, "_is_protocol", False)
        if not inspect.isclass(kind) or issubclass(kind, BaseException) or is_protocol:
            continue
        ours = [base for base in kind.__bases__ if base.__module__.startswith("zarr_manifests")]
        found |= {(name, base.__name__) for base in ours if base is not WrappedStorage}
    assert found == set()


def test_there_are_no_more_names_than_one_can_look_through() -> None:
    """The numbers may only fall."""
    classes = {kind: sum(1 for _ in own_members(kind)) for kind in (Repository, Session)}
    assert classes[Repository] <= 32
    assert classes[Session] <= 19
    assert len(zarr_manifests.__all__) <= 18
    assert sum(len(importlib.import_module(name).__all__) for name in PUBLIC) <= 61
    assert len(get_group(app).commands) <= 26
