"""Names are anybody's: whatever shows them shows text, and nothing that a terminal obeys."""

from __future__ import annotations

import inspect
import pickle
from pathlib import Path
from typing import Any

import pytest
import zarr
from typer.testing import CliRunner

import zarr_manifests as zm
from zarr_manifests import errors
from zarr_manifests.cli import app
from zarr_manifests.config.yaml_text import dump_yaml, load_yaml
from zarr_manifests.conflicts import Conflict
from zarr_manifests.error_cases import ConfigError, NotARepositoryError
from zarr_manifests.errors import (
    AlreadyExistsError,
    ConflictError,
    ManifestsError,
    NotFoundError,
    VirtualContainerError,
)
from zarr_manifests.format.virtual_sources import VirtualSource
from zarr_manifests.plain import plain_text
from zarr_manifests.planning.tables.resolved_chunks import ResolvedChunks
from zarr_manifests.reports import Problem, Status
from zarr_manifests.virtual.containers import Containers

HOSTILE = "a\x1b[2J\x9b31m\x07\u202eb\u2066c\u200bd\re\nerror: f\udc9bg"
SHOWN = r"a\x1b[2J\x9b31m\x07\u202eb\u2066c\u200bd\re\nerror: f\udc9bg"
NAME = "a\x1b[2J\x9b31m\u202eb\ne"
"""As much of it as can be the name of a node."""
NAME_SHOWN = r"a\x1b[2J\x9b31m\u202eb\ne"


def harmless(text: str) -> bool:
    return all(line.isprintable() for line in text.split("\n"))


def test_what_a_terminal_would_obey_is_written_out() -> None:
    assert plain_text(HOSTILE) == SHOWN
    assert plain_text(plain_text(HOSTILE)) == SHOWN
    assert plain_text("a\nb\x1b", lines=True) == "a\nb\\x1b"
    for text in ("", "Température à 2 m", "10\xa0km\u202f/\u2009h", "気温", "back\\slash"):
        assert plain_text(text) == text
    assert plain_text(Path("x")) == "x"


CLASSES = [
    kind
    for kind in vars(errors).values()
    if inspect.isclass(kind) and issubclass(kind, ManifestsError)
]


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_error_is_shown_harmless_and_keeps_what_it_was_given(
    kind: type[ManifestsError],
) -> None:
    error = kind([HOSTILE]) if kind is ConfigError else kind(HOSTILE)
    assert str(error) == f"{error}" == SHOWN
    assert error.args == (HOSTILE,)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), again.args, str(again)) == (kind, (HOSTILE,), SHOWN)
    assert repr(error).isprintable()


def test_what_an_error_has_besides_is_harmless() -> None:
    assert str(AlreadyExistsError(17, HOSTILE)) == f"[Errno 17] {SHOWN}"
    assert str(NotFoundError("'x' is not there")) == "'x' is not there"
    assert str(NotFoundError()) == ""
    assert issubclass(NotARepositoryError, FileNotFoundError)


def test_a_name_cannot_make_a_line_of_a_conflict() -> None:
    conflicts = [Conflict("chunk", f"/{HOSTILE}", "chunks", HOSTILE, ((1, 2),))] * 25
    error = ConflictError(HOSTILE, conflicts)
    first, *lines = str(error).split("\n")
    assert first == SHOWN
    assert lines == [f"  /{SHOWN}: chunks [(1, 2)]: {SHOWN}"] * 20 + ["  ... and 5 more"]
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.conflicts) == (str(error), error.conflicts)
    assert again.conflicts[0].path == f"/{HOSTILE}"


def test_what_is_made_of_lines_has_one_for_each() -> None:
    path = f"/{HOSTILE}"
    status = Status((path,), (path,), (path,), {path: 3}, {path: path + "2"}, {path: (1,)})
    assert len(str(status).split("\n")) == 7  # one more, since it was made again
    assert harmless(str(status))
    assert str(Problem(HOSTILE, "gone")) == f"{SHOWN}: gone"


@pytest.fixture
def hostile(tmp_path: Path) -> zm.Repository:
    repo = zm.create(tmp_path / NAME)
    with repo.transaction(message=NAME, metadata={NAME: NAME}) as store:
        array = zarr.create_array(
            store,
            name=NAME,
            shape=(4,),
            chunks=(2,),
            dtype="f8",
            dimension_names=[NAME],
            attributes={"units": NAME, NAME: NAME},
        )
        array[:] = 1.0
    return repo


def test_names_are_shown_harmless_by_all_that_shows_them(hostile: zm.Repository) -> None:
    session = hostile.writable_session()
    zarr.create_group(session.store, path=f"{NAME}2")
    fork = session.fork()
    texts = [
        repr(shown)
        for shown in (hostile, session, session.store, fork, pickle.loads(pickle.dumps(fork)))
    ]
    texts += [repr(hostile.storage), repr(session.chunk_refs(NAME)), str(session.status())]
    texts += [
        repr(session.status()),
        repr(next(hostile.ancestry())),
        repr(hostile.du(estimate=True)),
    ]
    texts += [shown._repr_html_() for shown in (hostile, session, session.store)]
    texts.append(repr(ResolvedChunks.from_table(HOSTILE, 1, None)))
    assert [text for text in texts if not harmless(text)] == []
    assert f"+ /{NAME_SHOWN}2" in str(session.status()).split("\n")


def test_errors_with_names_are_shown_harmless(hostile: zm.Repository, tmp_path: Path) -> None:
    def conflict() -> Any:
        sessions = [hostile.writable_session() for _ in range(2)]
        for value, session in enumerate(sessions):
            zarr.open_array(session.store, path=NAME)[:2] = value
            session.commit(NAME)

    calls: list[Any] = [
        conflict,
        lambda: hostile.create_branch(NAME),
        lambda: hostile.readonly_session(NAME),
        lambda: hostile.readonly_session(NAME),
        lambda: hostile.changes(NAME),
        lambda: hostile.writable_session().move(f"{NAME}3", "x"),
        lambda: hostile.writable_session().chunk_refs(f"{NAME}3"),
        lambda: zm.virtual.import_zarr(hostile, tmp_path / f"{NAME}3"),
        lambda: zm.open(tmp_path / f"{NAME}3"),
        lambda: zm.open(f"memory://{NAME}"),
        lambda: zm.open(hostile.storage, virtual_containers={NAME: "x"}),
        lambda: zm.open(hostile.storage, config={NAME: NAME}),
        lambda: hostile.writable_session().commit(NAME),
    ]
    for call in calls:
        with pytest.raises(ManifestsError) as caught:
            call()
        assert harmless(str(caught.value)), call
        lines = str(caught.value).split("\n")
        assert not any(line.startswith(("e", "error")) for line in lines[1:])


def test_locations_of_virtual_chunks_are_shown_harmless() -> None:
    for source in (VirtualSource("", f"file:///{HOSTILE[:-4]}"), VirtualSource("raw", HOSTILE)):
        with pytest.raises(VirtualContainerError) as caught:
            Containers().resolve(source)
        assert str(caught.value).isprintable()


@pytest.mark.slow
def test_no_verb_prints_what_a_terminal_obeys(hostile: zm.Repository, tmp_path: Path) -> None:
    hostile.create_branch("side")
    head, first = (info.snapshot_id for info in hostile.ancestry())
    url = str(tmp_path / NAME)
    calls = [
        ["log", url],
        ["tree", url],
        ["tree", url, "--chunks"],
        ["info", url],
        ["du", url],
        ["du", url, "--totals"],
        ["explain", url],
        ["explain", url, "--array", NAME],
        ["diff", url, first, head],
        ["diff", url, first, head, "--json"],
        ["branch", url],
        ["branch", url, NAME],
        ["branch", url, NAME, "-d"],
        ["tag", url, NAME],
        ["verify", url],
        ["ops", url],
        ["config", "show", url],
        ["config", "set", url, f"{NAME}=1"],
        ["config", "validate", url],
        ["log", url, "--at", NAME],
        ["tree", str(tmp_path / f"{NAME}3")],
    ]
    for call in calls:
        done = CliRunner().invoke(app, call)
        assert done.output, call
        assert harmless(done.output), call
        assert not any(line.startswith("e\x20") for line in done.output.split("\n")), call


def test_a_configuration_is_shown_harmless_and_read_back_as_it_was() -> None:
    for values in ({"a": HOSTILE[:-4]}, {"a": "気温", "b": "\u202e"}, {"a": "é"}):
        text = dump_yaml(values)
        assert harmless(text)
        assert load_yaml(text) == values
    assert "é" in dump_yaml({"a": "é"})
