"""The tree of errors: what callers catch, and how they travel."""

from __future__ import annotations

import inspect
import pickle
import re
from pathlib import Path

import pytest

from zarr_manifests import error_cases, errors
from zarr_manifests.conflicts import Conflict, ConflictKind
from zarr_manifests.error_cases import ConfigError
from zarr_manifests.errors import (
    CommitOutcomeUnknownError,
    ConflictError,
    CorruptObjectError,
    ManifestsError,
    MissingChunkError,
    NotFoundError,
    SnapshotExpiredError,
)

ALL = [
    kind
    for kind in {**vars(errors), **vars(error_cases)}.values()
    if inspect.isclass(kind) and issubclass(kind, BaseException) and not issubclass(kind, Warning)
]
BUILT_IN = {
    "AlreadyExistsError": FileExistsError,
    "CommitOutcomeUnknownError": OSError,
    "ConfigError": ValueError,
    "ConflictError": RuntimeError,
    "CorruptObjectError": OSError,
    "FencedError": PermissionError,
    "LeaseError": RuntimeError,
    "InvalidArgumentError": ValueError,
    "MissingChunkError": OSError,
    "NotARepositoryError": FileNotFoundError,
    "NotFoundError": KeyError,
    "ObjectNotFoundError": FileNotFoundError,
    "ReadOnlyError": PermissionError,
    "SessionClosedError": ValueError,
    "SnapshotExpiredError": LookupError,
    "StorageError": OSError,
    "StorageFullError": OSError,
    "UnmergedForksError": RuntimeError,
    "UnsupportedFormatError": ValueError,
    "UnsupportedStorageError": ValueError,
    "VirtualContainerError": PermissionError,
    "VirtualSourceChangedError": OSError,
    "WhereError": ValueError,
}


def test_the_tree_is_as_documented() -> None:
    page = (Path(__file__).parents[1] / "docs" / "errors.md").read_text(encoding="utf-8")
    tree = page.split("```text")[1].split("```")[0]
    documented: dict[str, set[str]] = {}
    above = ["Exception"]
    for indent, name, built_ins in re.findall(
        r"^([│├└─ ]*)(\w+)(?: \((.+)\))?$", tree, re.MULTILINE
    ):
        depth = 1 + len(indent) // 4
        documented[name] = {above[depth - 1], *(built_ins.split(", ") if built_ins else ())}
        above[depth:] = [name]
    assert documented == {kind.__name__: {b.__name__ for b in kind.__bases__} for kind in ALL}


def test_a_case_is_caught_as_an_error_that_callers_know() -> None:
    assert all(issubclass(kind, ManifestsError) for kind in ALL)
    known = {getattr(errors, name) for name in errors.__all__} - {ManifestsError}
    apart = {kind.__name__ for kind in ALL if not known.intersection(kind.__mro__)}
    assert apart == {"ManifestsError", "JavaNotFoundError"}
    assert len({kind.__new__(kind).kind for kind in ALL}) == len(ALL) > 15


@pytest.mark.parametrize("name", BUILT_IN)
def test_each_is_the_built_in_a_caller_would_expect(name: str) -> None:
    assert issubclass({kind.__name__: kind for kind in ALL}[name], BUILT_IN[name])


@pytest.mark.parametrize("kind", [CorruptObjectError, MissingChunkError, SnapshotExpiredError])
def test_damage_is_never_taken_for_an_absent_chunk(kind: type[ManifestsError]) -> None:
    """Zarr reads the fill value where a store raises one of these."""
    assert not issubclass(kind, KeyError | FileNotFoundError)


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_they_can_be_pickled(kind: type[ManifestsError]) -> None:
    """Workers of dask and Spark send them home."""
    error = kind(("a: first", "b: second")) if kind is ConfigError else kind("what happened")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert str(again) == str(error)
    assert "what happened" in str(error) or kind is ConfigError


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_they_can_be_made_as_distributed_makes_them(kind: type[ManifestsError]) -> None:
    """Its unpickling calls `__new__`, which is refused if the wrong base comes first."""
    assert isinstance(kind.__new__(kind), kind)


def test_what_they_carry_travels_with_them() -> None:
    conflict = Conflict(ConflictKind.CHUNK, "/a", "chunks", "came first", ((1, 2),))
    error = pickle.loads(pickle.dumps(ConflictError("no", [conflict])))
    assert error.conflicts == (conflict,)
    assert "/a: chunks [(1, 2)]: came first" in str(error)
    unknown = pickle.loads(pickle.dumps(CommitOutcomeUnknownError("?", "ab12")))
    assert unknown.commit_id == "ab12"
    config = pickle.loads(pickle.dumps(ConfigError(["a: x", "b: y"])))
    assert config.problems == ("a: x", "b: y")


def test_a_long_list_of_conflicts_is_cut() -> None:
    conflicts = [Conflict(ConflictKind.METADATA, f"/{i}", "metadata", "changed") for i in range(25)]
    error = ConflictError("no", conflicts)
    assert len(error.conflicts) == 25
    assert "/19:" in str(error)
    assert "/20:" not in str(error)
    assert "and 5 more" in str(error)


def test_not_found_shows_its_message_and_not_its_repr() -> None:
    assert str(NotFoundError("there is no branch 'x'")) == "there is no branch 'x'"
    assert str(NotFoundError()) == ""


def test_every_conflict_is_of_a_kind_and_every_kind_is_made_and_documented() -> None:
    package = Path(errors.__file__).parent
    made = set()
    for path in package.rglob("*.py"):
        if path.name != "errors.py":
            made |= set(re.findall(r"ConflictKind\.([A-Z]+)", path.read_text(encoding="utf-8")))
    assert made == set(ConflictKind.__members__)
    assert next(iter(inspect.signature(Conflict).parameters)) == "kind"
    for page in ("errors.md", "guide/conflicts.md"):
        text = (package.parent / "docs" / page).read_text(encoding="utf-8")
        rows = re.findall(r"^\| `\"([a-z]+)\"` \|", text, re.MULTILINE)
        assert rows == [str(kind) for kind in ConflictKind], page
