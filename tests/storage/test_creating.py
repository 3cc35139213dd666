"""Creating a repository in an object store: in two rounds of requests, and nowhere it should not.

A round is counted by holding its requests back until all of them have come: were one of them sent
only after another is answered, none would be.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

import zarr_manifests as zm
from small_store import Answer, Request
from zarr_manifests.error_cases import UnsupportedStorageError
from zarr_manifests.errors import AlreadyExistsError, StorageError
from zarr_manifests.runtime import SYSTEM
from zarr_manifests.storage import from_url
from zarr_manifests.storage.object_proof import Proof

URL = "s3://bucket/prefix"
LISTINGS = ["GET /bucket"]
OBJECTS = ["PUT /bucket/prefix/deltas", "PUT /bucket/prefix/snapshots"]
PROBE = "PUT /bucket/prefix/.probe"
ROOT = "PUT /bucket/prefix/current"


def _kind(request: Any) -> str:
    """What is asked for, without names that are random."""
    parts = f"{request.method} {request.path}".split("/")
    return "/".join(parts[:4]) if parts[-1] != ".probe" else "/".join(parts)


@contextmanager
def _rounds(store: Any, *rounds: list[str]) -> Iterator[None]:
    """Answer requests of a round once all of it have come; check that there are no others."""
    due = [sorted(one) for one in rounds]
    come: list[str] = []
    changed = threading.Condition()
    done = 0

    def hold(request: Any) -> None:
        nonlocal done
        kind = _kind(request)
        if kind == "PUT /bucket/prefix/root":  # an archive, which goes up in the background
            return
        with changed:
            mine = done
            come.append(kind)
            if mine < len(due) and len(come) == len(due[mine]):
                assert sorted(come) == due[mine]
                come.clear()
                done += 1
                changed.notify_all()
            assert changed.wait_for(lambda: done > mine, timeout=20), (mine, come)

    store.faults.append(hold)
    yield
    store.faults.remove(hold)
    assert (done, come) == (len(due), [])


def test_creating_takes_two_rounds(small_store: Any) -> None:
    with _rounds(small_store, [*LISTINGS, *OBJECTS, PROBE, PROBE], [PROBE, ROOT]):
        zm.create(URL)
    assert zm.open(URL).verify().ok


def test_the_root_waits_until_it_is_known_to_replace_no_other(small_store: Any) -> None:
    taken: list[Any] = []

    def take(request: Any) -> Any:
        """Take the first two requests for the probe, as if it were removed between them."""
        if not request.path.endswith("/.probe") or len(taken) == 2:
            return None
        taken.append(request)
        small_store.objects["bucket/prefix/.probe"] = request.body
        return Answer(200, b"", {"ETag": '"1"'})

    early = [*LISTINGS, *OBJECTS, PROBE, PROBE]
    with _rounds(small_store, early, [PROBE, PROBE], [ROOT]):
        small_store.faults.append(take)
        zm.create(URL)
    assert zm.open(URL).verify().ok


def test_the_first_root_is_archived_once_the_proof_has_ended(small_store: Any) -> None:
    zm.create(URL, runtime=replace(SYSTEM, background=lambda call: call()))
    tried = [_kind(Request("PUT", f"/{name}", {}, {}, b"")) for name in small_store.objects]
    assert sorted(tried) == sorted([*OBJECTS, PROBE, ROOT, "PUT /bucket/prefix/root"])
    assert small_store.requests[-1].startswith("PUT /bucket/prefix/root/")


def test_a_proof_without_an_answer_is_made_up_for_by_the_first_commit(small_store: Any) -> None:
    def deny(request: Any) -> Any:
        swaps = request.headers.get("If-Match") and request.path.endswith("/.probe")
        return Answer.refusal(403, "AccessDenied") if swaps else None

    small_store.faults.append(deny)
    repo = zm.create(URL)
    with pytest.raises(StorageError, match=r"'\.probe'.* rights"):
        repo.create_tag("v1", repo.readonly_session().snapshot_id)
    small_store.faults.remove(deny)
    repo.create_tag("v1", repo.readonly_session().snapshot_id)
    assert zm.open(URL).verify().ok


def test_creating_takes_two_rounds_where_conditions_are_promised(
    small_store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Proof, "due", False)
    with _rounds(small_store, [*LISTINGS, *OBJECTS], [ROOT]):
        zm.create(URL)


@pytest.mark.parametrize("there", ["thesis.pdf", "holiday photo.jpg", "current"])
def test_a_place_that_is_not_empty_is_left_as_it_was(small_store: Any, there: str) -> None:
    small_store.objects[f"bucket/prefix/{there}"] = b"mine"
    with pytest.raises(AlreadyExistsError):
        zm.create(URL)
    assert small_store.objects == {f"bucket/prefix/{there}": b"mine"}


def test_the_probe_of_others_is_left_where_it_is(small_store: Any) -> None:
    zm.create(URL)
    Proof._made.clear()
    before = set(small_store.objects)
    with pytest.raises(AlreadyExistsError, match="there is a repository"):
        zm.create(URL)
    assert set(small_store.objects) >= before


@pytest.mark.parametrize("ignored", ["If-None-Match", "If-Match"])
def test_a_store_that_ignores_conditions_keeps_no_snapshot(small_store: Any, ignored: str) -> None:
    small_store.heeds -= {ignored}
    with pytest.raises(UnsupportedStorageError, match=f"takes no notice of {ignored}"):
        zm.create(URL)
    assert list(small_store.objects) == ["bucket/prefix/.probe"]
    if ignored == "If-None-Match":
        assert ROOT not in small_store.requests


def test_a_probe_that_somebody_withdraws_is_no_bad_sign(small_store: Any) -> None:
    """Another process has made it, found the place occupied, and removes it."""
    small_store.objects["bucket/prefix/.probe"] = b""

    def withdraw(request: Any) -> None:
        if request.headers.get("If-Match"):
            small_store.objects.pop("bucket/prefix/.probe", None)

    small_store.faults.append(withdraw)
    assert from_url(URL).create("a", b"1")
    assert list(small_store.objects) == ["bucket/prefix/a"]


def test_who_may_not_write_hears_what_is_there(small_store: Any) -> None:
    zm.create(URL)
    Proof._made.clear()
    small_store.refuse({"PUT", "DELETE"}, 403, "AccessDenied")
    with pytest.raises(AlreadyExistsError, match="there is a repository"):
        zm.create(URL)
