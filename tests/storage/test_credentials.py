"""Credentials by a function: who is asked, when again, and where no secret is found."""

from __future__ import annotations

import logging
import pickle
import traceback
from collections.abc import Iterator
from functools import partial
from typing import Any

import cloudpickle
import pytest
import zarr

import accounts
import zarr_manifests as zm
from zarr_manifests.errors import InvalidArgumentError, StorageError
from zarr_manifests.repository import containers_of
from zarr_manifests.storage import from_url
from zarr_manifests.storage.object_store import ObjectStorage


@pytest.fixture
def signed(small_store: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The requests; the environment has the address and no credentials."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    accounts.ASKED.clear()
    requests: list[Any] = []
    small_store.faults.append(requests.append)
    yield requests
    accounts.ASKED.clear()


def _open(credentials: Any, **options: Any) -> ObjectStorage:
    storage = from_url("s3://bucket/prefix", credentials=credentials, **options)
    assert isinstance(storage, ObjectStorage)
    return storage


def _who(requests: list[Any]) -> list[str]:
    return [r.headers["Authorization"].partition("Credential=")[2].split("/")[0] for r in requests]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (accounts.failing, "raised an error"),
        (accounts.no_mapping, "did not return a mapping of the right keys"),
        (accounts.other_keys, "did not return a mapping of the right keys"),
        (accounts.naive_time, "a datetime with a time zone"),
    ],
)
@pytest.mark.usefixtures("impatient", "signed")
def test_faults_of_the_function_are_told_without_its_words(given: Any, says: str) -> None:
    with pytest.raises(StorageError, match=says) as raised:
        _open(given).get("a")
    assert accounts.SECRET not in "".join(traceback.format_exception(raised.value))


@pytest.mark.parametrize("made", [partial(dict), accounts.Provider()])
def test_what_has_no_name_is_not_pickled(made: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="pass a function or class at the top"):
        pickle.dumps(_open(made))


def test_a_container_has_credentials_of_its_own(
    small_store: Any, signed: list[Any], impatient: None, caplog: pytest.LogCaptureFixture
) -> None:
    """The repository is Alice's, the files that it refers to are Bob's; no secret is told."""
    caplog.set_level(logging.DEBUG)
    small_store.objects["raw/a.bin"] = bytes(range(8))
    raw = zm.VirtualContainer("s3://raw", credentials=accounts.bob)
    given: dict[str, Any] = {
        "storage_options": {"credentials": accounts.alice},
        "virtual_containers": {"raw": raw},
    }
    repo = zm.create("s3://bucket/prefix", **given)
    with repo.transaction(message="refer") as store:
        zarr.create_array(store, name="t", shape=8, chunks=4, dtype="u1", compressors=None)
        store.set_virtual_refs("t", [[0], [1]], ["virtual://raw/a.bin"], [0, 0], [0, 4], [4, 4])
    session = repo.readonly_session()
    again, store = pickle.loads(pickle.dumps((repo, session.store)))
    for one in (session.store, store, again.readonly_session().store):
        assert zarr.open_array(one, path="t", mode="r")[:].tolist() == list(range(8))
    whose = {"raw": set[str](), "bucket": set[str]()}
    for request, who in zip(signed, _who(signed), strict=True):
        whose[request.path.split("/")[1]].add(who)
    assert whose == {"raw": {"BOB"}, "bucket": {"ALICE"}}
    small_store.faults.append(
        lambda request: type(small_store.perform(request)).refusal(
            403, "AccessDenied", str(request.headers)
        )
    )
    with pytest.raises(StorageError) as raised:
        zarr.open_array(repo.readonly_session().store, path="t", mode="r")[:]
    said = [
        *(repr(one) for one in (raw, repo, containers_of(repo), session.store)),
        repr(vars(repo)),
        *traceback.format_exception(raised.value),
        *(dumps((repo, store)).decode("latin-1") for dumps in (pickle.dumps, cloudpickle.dumps)),
        *(data.decode("latin-1") for data in small_store.objects.values()),
        caplog.text,
    ]
    assert not [text for text in said if accounts.SECRET in text]


def test_what_has_the_name_of_another_is_not_pickled(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = accounts.alice
    monkeypatch.setattr(accounts, "alice", accounts.bob)  # who would be asked for hers
    with pytest.raises(InvalidArgumentError, match="pass a function or class at the top"):
        pickle.dumps(_open(hidden))
