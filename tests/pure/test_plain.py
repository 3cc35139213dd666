"""Names are anybody's: whatever shows them shows text, and nothing that a terminal obeys."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import zarr
from typer.testing import CliRunner

import zarr_manifests as zm
from zarr_manifests.cli import app
from zarr_manifests.errors import (
    AlreadyExistsError,
    ConfigError,
    Conflict,
    ConflictError,
    ManifestsError,
    NotFoundError,
)

HOSTILE = "a\x1b[2J\x9b31m\x07\u202eb\u2066c\u200bd\re\nerror: f\udc9bg"
SHOWN = r"a\x1b[2J\x9b31m\x07\u202eb\u2066c\u200bd\re\nerror: f\udc9bg"
NAME = "a\x1b[2J\x9b31m\u202eb\ne"
"""As much of it as can be the name of a node."""
NAME_SHOWN = r"a\x1b[2J\x9b31m\u202eb\ne"


def harmless(text: str) -> bool:
    return all(line.isprintable() for line in text.split("\n"))


@pytest.mark.parametrize("kind", [ManifestsError, ConfigError, NotFoundError, ConflictError])
def test_an_error_is_shown_harmless_and_keeps_what_it_was_given(
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


def test_a_name_cannot_make_a_line_of_a_conflict() -> None:
    conflicts = [Conflict("chunk", f"/{HOSTILE}", "chunks", HOSTILE, ((1, 2),))] * 25
    error = ConflictError(HOSTILE, conflicts)
    first, *lines = str(error).split("\n")
    assert first == SHOWN
    assert lines == [f"  /{SHOWN}: chunks [(1, 2)]: {SHOWN}"] * 20 + ["  ... and 5 more"]
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.conflicts) == (str(error), error.conflicts)
    assert again.conflicts[0].path == f"/{HOSTILE}"


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
    status, info = session.status(), next(hostile.ancestry())
    shown = (hostile, hostile.storage, session, session.store, session.fork(), status, info)
    texts = [repr(one) for one in (*shown, session.chunk_refs(NAME), hostile.du(estimate=True))]
    texts += [one._repr_html_() for one in (hostile, session)]
    assert [text for text in texts if not harmless(text)] == []
    assert f"+ /{NAME_SHOWN}2" in str(status).split("\n")


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
        lambda: hostile.writable_session().move(f"{NAME}3", "x"),
        lambda: zm.virtual.import_zarr(hostile, tmp_path / f"{NAME}3"),
        lambda: zm.open(tmp_path / f"{NAME}3"),
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


def test_no_verb_prints_what_a_terminal_obeys(hostile: zm.Repository, tmp_path: Path) -> None:
    head, first = (info.snapshot_id for info in hostile.ancestry())
    url = str(tmp_path / NAME)
    for call in (
        ["log", url],
        ["tree", url, "--chunks"],
        ["info", url],
        ["explain", url, "--array", NAME],
        ["diff", url, first, head],
        ["branch", url, NAME],
        ["ops", url],
        ["config", "set", url, f"{NAME}=1"],
        ["tree", str(tmp_path / f"{NAME}3")],
    ):
        done = CliRunner().invoke(app, call)
        assert done.output, call
        assert harmless(done.output), call
