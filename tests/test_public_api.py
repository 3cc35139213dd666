"""What is public is listed, documented, and as documented."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAliasType

import pytest
from typer.main import get_group

import zarr_manifests
from zarr_manifests import Repository, Session
from zarr_manifests.cli.app import app
from zarr_manifests.storage import Storage
from zarr_manifests.storage.disk import Disk
from zarr_manifests.storage.protocol import ReadsInto
from zarr_manifests.testing import WrappedStorage

API = (Path(__file__).parents[1] / "docs" / "api.md").read_text(encoding="utf-8")
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


def sections(pattern: str, text: str) -> dict[str, str]:
    """The text below each heading that matches."""
    parts = re.split(rf"^{pattern}$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def code_spans(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", text)


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_in_the_reference(name: str) -> None:
    section = sections(r"## (zarr_manifests[.\w]*)", API)[name]
    named = {re.match(r"[\w.]*", span)[0] for span in code_spans(section)}
    assert set(importlib.import_module(name).__all__) <= named


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_module_has_a_page_of_its_docstrings(name: str) -> None:
    page = Path(__file__).parents[1] / f"docs/reference/{name.rpartition('.')[2]}.md"
    assert page.read_text(encoding="utf-8") == f"# {name}\n\n::: {name}\n"


@pytest.mark.parametrize("name", ["Repository", "Session", "Fork", "Config"])
def test_every_method_is_in_the_reference(name: str) -> None:
    named = {re.match(r"[\w.]*", span)[0].rpartition(".")[2] for span in code_spans(API)}
    members = {member for member, _ in own_members(getattr(zarr_manifests, name))}
    assert members <= named


def documented_signatures() -> Iterator[tuple[str, Any, str]]:
    """Every `name(parameters)` of the reference with the object it is about."""
    for module_name, section in sections(r"## (zarr_manifests[.\w]*)", API).items():
        module = importlib.import_module(module_name)
        head, *_ = re.split(r"^### ", section, flags=re.MULTILINE)
        owners: dict[str, tuple[ModuleType | type, str]] = {"": (module, head)}
        for title, text in sections(r"### `(\w+)`", section).items():
            owners[title] = (getattr(module, title), text)
        for title, (owner, text) in owners.items():
            for span in code_spans(text):
                found = re.fullmatch(r"([\w.]+)\((.*)\)", span)
                if found is None:
                    continue
                path = found[1].removeprefix(f"{title}.") if title else found[1]
                target: Any = owner
                if title and not hasattr(owner, path.partition(".")[0]):
                    target = module  # a class, in the section of another or its own
                for part in path.split("."):
                    target = getattr(target, part, None)
                if not callable(target):  # a method, named in the line of its class
                    continue
                yield f"{module_name}: {span}", target, f"def f({found[2]}): ..."


SIGNATURES = [pytest.param(t, text, id=name) for name, t, text in documented_signatures()]


def shape(signature: inspect.Signature) -> list[tuple[str, Any, Any]]:
    return [
        (p.name, p.kind, p.default)
        for p in signature.parameters.values()
        if p.name not in ("self", "cls")
    ]


@pytest.mark.parametrize(("target", "text"), SIGNATURES)
def test_signatures_are_as_documented(target: Any, text: str) -> None:
    namespace: dict[str, Any] = {}
    defaults = {**vars(importlib.import_module("zarr_manifests.errors"))}
    defaults["timedelta"] = timedelta
    defaults["SYSTEM"] = importlib.import_module("zarr_manifests.runtime").SYSTEM
    assert isinstance(ast.parse(text).body[0], ast.FunctionDef)
    exec(text, defaults, namespace)  # noqa: S102 - the project's own page
    assert shape(inspect.signature(target)) == shape(inspect.signature(namespace["f"]))


def test_signatures_are_found() -> None:
    assert len(SIGNATURES) >= 30


def has_docstring(kind: type | None, name: str, value: Any) -> bool:
    doc = inspect.getdoc(value) or (kind and inspect.getdoc(getattr(kind, name)))
    # What keeps a protocol of storages is documented there.
    protocols = [each for each in (Storage, ReadsInto, Disk) if hasattr(each, name)]
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
    assert classes[Session] <= 18
    assert len(zarr_manifests.__all__) <= 17
    assert sum(len(importlib.import_module(name).__all__) for name in PUBLIC) <= 60
    assert len(get_group(app).commands) <= 25
