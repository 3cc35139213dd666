"""Credentials by a function: who is asked, when again, and where no secret is found."""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import json
import logging
import os
import pickle
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import cloudpickle
import numpy as np
import pytest
import zarr

import accounts
import zarr_manifests as zm
from zarr_manifests.error_cases import ConfigError, UnsupportedStorageError
from zarr_manifests.errors import InvalidArgumentError, StorageError
from zarr_manifests.repository import containers_of
from zarr_manifests.storage import from_url
from zarr_manifests.storage.metered import metered, place_of
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


def test_two_accounts_in_one_process(signed: list[Any]) -> None:
    alice, bob = _open(accounts.alice), _open(accounts.bob)
    alice.put("a", b"1")
    bob.put("b", b"2")
    alice.get("a")
    assert _who(signed) == ["ALICE", "BOB", "ALICE"]
    assert [r.headers.get("x-amz-security-token", "") for r in signed] == [
        "",
        f"{accounts.SECRET}token",
        "",
    ]
    assert accounts.ASKED == ["ALICE", "BOB"]


def test_a_repository_is_cloned_from_one_account_to_another(
    signed: list[Any], small_store: Any
) -> None:
    theirs = zm.create(
        "s3://bucket/theirs",
        {"inline-chunk-bytes": 0},
        storage_options={"credentials": accounts.alice},
    )
    with theirs.transaction(message="observed") as store:
        zarr.create_array(store, name="a", data=np.arange(8), chunks=(2,))
    theirs.compact(mode="full")
    with theirs.transaction(message="more") as store:
        zarr.open_array(store, path="a")[2:4] = 9
    theirs.create_tag("release", theirs.list_branches()["main"])
    mine = {"credentials": accounts.bob}
    report = zm.clone(theirs, "s3://bucket/ours", storage_options=mine)
    assert report.chunks > 0
    ours = zm.open("s3://bucket/ours", storage_options=mine)
    array = zarr.open_array(ours.readonly_session("release").store, path="a", mode="r")
    assert array[:].tolist() == [0, 1, 9, 9, 4, 5, 6, 7]
    assert ours.verify().ok
    where = [f"{one.path}/{one.query.get('prefix', '')}/{one.body!r}" for one in signed]
    asked = {
        (who, place)
        for who, at in zip(_who(signed), where, strict=True)
        for place in ("theirs", "ours")
        if place in at
    }
    assert asked == {("ALICE", "theirs"), ("BOB", "ours")}
    assert not any(accounts.SECRET.encode() in body for body in small_store.objects.values())


def test_credentials_are_asked_for_again_when_they_expire(signed: list[Any]) -> None:
    storage = _open(accounts.brief)
    for key in ("a", "b"):
        storage.put(key, b"1")
        signed.clear()
        while _who(signed)[-1:] in ([], ["BRIEF0"]):  # the client waits a moment between two
            storage.get(key)
    assert len(accounts.ASKED) > 1


@pytest.mark.parametrize("asked", [accounts.awaited, accounts.Provider])
def test_coroutines_and_classes(signed: list[Any], asked: Any) -> None:
    storage = _open(asked)
    storage.put("a", b"1")

    async def within_a_loop() -> bytes:
        return storage.get("a") + await storage.get_async("a", 0, 1)

    assert asyncio.run(within_a_loop()) == b"11"
    due = {accounts.awaited: ["AWAITED"], accounts.Provider: ["made", "CLASS"]}[asked]
    assert accounts.ASKED == due
    assert set(_who(signed)) == {due[-1]}


def test_a_class_of_obstore_serves(signed: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")  # given credentials take precedence
    storage = _open(lambda: {**accounts.alice(), "token": None, "expires_at": None})
    storage.put("a", b"1")
    assert _who(signed) == ["ALICE"]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (accounts.failing, "raised an error; call it yourself"),
        (accounts.no_mapping, "did not return a mapping"),
        (accounts.other_keys, "did not return the right keys"),
        (accounts.naive_time, "not a datetime with a time zone"),
    ],
)
@pytest.mark.usefixtures("impatient", "signed")
def test_faults_of_the_function_are_told_without_its_words(given: Any, says: str) -> None:
    with pytest.raises(StorageError, match=says) as raised:
        _open(given).get("a")
    assert accounts.SECRET not in "".join(traceback.format_exception(raised.value))


def test_what_is_shared_tells_accounts_apart(signed: list[Any]) -> None:
    alice, again, bob = _open(accounts.alice), _open(accounts.alice), _open(accounts.bob)
    assert place_of(metered(alice)) == place_of(alice) == place_of(again) != place_of(bob)
    assert place_of(alice) != place_of(_open(accounts.alice, region="eu-west-3"))
    repo = zm.create(alice)
    with repo.transaction(message="two values") as store:
        zarr.create_array(store, name="t", data=np.array([1.0, 2.0]))
    for storage, who in ((alice, "ALICE"), (bob, "BOB")):
        with zm.open(storage).writable_session() as session:
            fork = pickle.loads(pickle.dumps(session.fork()))
            signed.clear()
            zarr.open_array(fork.store, path="t")[0] = 5.0
            assert set(_who(signed)) <= {who}
            zarr.open_array(fork.store, path="t", mode="r")[:]
            assert set(_who(signed)) <= {who}


def test_arguments_of_a_partial_are_not_shown(signed: list[Any]) -> None:
    storage = _open(partial(dict, access_key_id="A", secret_access_key=accounts.SECRET))
    storage.put("a", b"1")
    assert accounts.SECRET not in repr((storage, storage.place))
    assert _who(signed) == ["A"]


@pytest.mark.parametrize("given", [{"secret_access_key": accounts.SECRET}, accounts.SECRET, 5])
def test_secrets_are_no_credentials(given: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="a function without arguments") as raised:
        _open(given)
    assert accounts.SECRET not in str(raised.value)


def test_who_gives_credentials_is_said_once() -> None:
    with pytest.raises(ConfigError, match="contradicts anonymous"):
        _open(accounts.alice, anonymous=True)
    with pytest.raises(ConfigError, match="contradicts profile"):
        _open(accounts.alice, profile="winds")


@pytest.mark.parametrize("url", ["winds", "memory://winds", "https://host/winds"])
def test_only_object_stores_take_credentials(url: str) -> None:
    with pytest.raises(ConfigError, match="credentials: unknown storage option"):
        from_url(url, credentials=accounts.alice)


def test_a_pickle_names_the_function(signed: list[Any]) -> None:
    storage = _open(accounts.alice)
    storage.put("a", b"1")
    for dumps in (pickle.dumps, cloudpickle.dumps):
        data = dumps(storage)
        assert accounts.SECRET.encode() not in data
        again = pickle.loads(data)
        assert again.place == storage.place
        assert again.get("a") == b"1"
    assert set(_who(signed)) == {"ALICE"}


@pytest.mark.parametrize("made", [partial(dict), accounts.Provider()])
def test_what_has_no_name_is_not_pickled(made: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="pass a function or class at the top"):
        pickle.dumps(_open(made))


def test_what_a_notebook_defines_is_not_pickled_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    # cloudpickle would take the code of such a function, with the secrets in it.
    def theirs() -> dict[str, str]:
        return {"access_key_id": "PLANTEDid", "secret_access_key": "PLANTEDsecret"}

    theirs.__module__, theirs.__qualname__ = "__main__", "theirs"
    monkeypatch.setattr(sys.modules["__main__"], "theirs", theirs, raising=False)
    data = cloudpickle.dumps(_open(theirs))
    assert b"PLANTED" not in data
    monkeypatch.delattr(sys.modules["__main__"], "theirs")
    with pytest.raises(InvalidArgumentError, match="cannot be imported in this process"):
        pickle.loads(data)


READER = """
import pickle, sys, zarr
repo, store = pickle.load(sys.stdin.buffer)
array = zarr.open_array(store, path="t", mode="r")
assert array[:].tolist() == [1.0, 2.0], array[:]
with repo.transaction(message="from another process") as store:
    zarr.open_array(store, path="t")[0] = 5.0
import accounts
print(accounts.ASKED)
"""


@pytest.mark.slow
def test_another_process_asks_for_credentials_itself(signed: list[Any]) -> None:
    repo = zm.create("s3://bucket/prefix", storage_options={"credentials": accounts.alice})
    with repo.transaction(message="two values") as store:
        zarr.create_array(store, name="t", data=np.array([1.0, 2.0]))
    data = pickle.dumps((repo, repo.readonly_session().store))
    assert accounts.SECRET.encode() not in data
    signed.clear()
    found = subprocess.run(
        [sys.executable, "-c", READER],
        input=data,
        capture_output=True,
        timeout=120,
        check=False,
        env=os.environ | {"PYTHONPATH": ":".join(sys.path)},
    )
    assert found.returncode == 0, found.stderr.decode()
    assert b"ALICE" in found.stdout
    assert set(_who(signed)) == {"ALICE"}
    assert len(list(repo.ancestry("main"))) == 3


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


def test_planted_secrets_are_found_nowhere(
    small_store: Any, signed: list[Any], impatient: None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    options = {"credentials": accounts.bob, "headers": {"x-team": "winds"}}
    repo = zm.create("s3://bucket/prefix", storage_options=options)
    with repo.transaction(message="two values") as store:
        zarr.create_array(store, name="t", data=np.array([1.0, 2.0]))
    session = repo.readonly_session()
    place = repo.storage.place  # type: ignore[attr-defined]
    said = [
        *(repr(one) for one in (repo, repo.storage, place, session, session.store)),
        *(repo.storage.url, repo._repr_html_(), repr(vars(repo))),
        repr(list(repo.ops_log())),
    ]
    small_store.faults.append(
        lambda request: type(small_store.perform(request)).refusal(
            403, "AccessDenied", str(request.headers)
        )
    )
    with pytest.raises(StorageError) as raised:
        zm.open("s3://bucket/prefix", storage_options=options)
    said += traceback.format_exception(raised.value)
    for dumps in (pickle.dumps, cloudpickle.dumps):
        said.append(dumps((repo, session.store)).decode("latin-1"))
    said += [caplog.text]
    said += [data.decode("latin-1") for data in small_store.objects.values()]
    assert {"BOB"} == set(_who(signed))
    assert not [text for text in said if accounts.SECRET in text]


# --- profiles ----------------------------------------------------------------------------------


@pytest.fixture
def profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config").write_text(
        "[profile winds]\nregion = eu-north-1\n\n[profile spoiled]\ncredential_process = false\n"
    )
    (tmp_path / "credentials").write_text(
        f"[winds]\naws_access_key_id = WINDS\naws_secret_access_key = {accounts.SECRET}\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))


def _profiled(profile: str, **options: Any) -> ObjectStorage:
    storage = from_url("s3://bucket/prefix", profile=profile, **options)
    assert isinstance(storage, ObjectStorage)
    return storage


@pytest.mark.usefixtures("profiles")
def test_a_profile_gives_credentials_and_region(
    signed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_REGION", raising=False)
    monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)
    storage = _profiled("winds")
    storage.put("a", b"1")
    again = pickle.loads(pickle.dumps(storage))
    assert accounts.SECRET.encode() not in pickle.dumps(storage)
    assert again.get("a") == b"1"
    _profiled("winds", region="eu-west-3").get("a")
    assert set(_who(signed)) == {"WINDS"}
    regions = [r.headers["Authorization"].split("/")[2] for r in signed]
    assert regions == ["eu-north-1", "eu-north-1", "eu-west-3"]


class _SignedIn(BaseHTTPRequestHandler):
    """What AWS's single sign-on answers to the token that `aws sso login` has left."""

    asked: ClassVar[list[tuple[str, str | None]]] = []

    def do_GET(self) -> None:
        self.asked.append((self.path, self.headers.get("x-amz-sso_bearer_token")))
        keys = {
            "accessKeyId": "SIGNEDIN",
            "secretAccessKey": accounts.SECRET,
            "sessionToken": f"{accounts.SECRET}session",
            "expiration": 4_000_000_000_000,
        }
        body = json.dumps({"roleCredentials": keys}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def test_the_token_of_a_single_sign_on_gives_credentials(
    signed: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the SDK leaves it in ~/.aws/sso/cache; nothing is asked for by a browser."""
    sdk = pytest.importorskip("botocore.credentials")
    start = "https://winds.awsapps.com/start"
    home = tmp_path / ".aws"
    (home / "sso" / "cache").mkdir(parents=True)
    (home / "config").write_text(
        f"[profile sso]\nsso_start_url = {start}\nsso_region = eu-north-1\n"
        "sso_account_id = 123456789012\nsso_role_name = reader\nregion = eu-north-1\n"
    )
    name = hashlib.sha1(start.encode(), usedforsecurity=False).hexdigest()
    token = {"accessToken": "TOKEN", "expiresAt": "2096-01-01T00:00:00Z", "startUrl": start}
    (home / "sso" / "cache" / f"{name}.json").write_text(json.dumps(token))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(home / "config"))
    # Found from the home directory when the SDK is imported.
    monkeypatch.setattr(sdk.SSOProvider, "_SSO_TOKEN_CACHE_DIR", str(home / "sso" / "cache"))
    for variable in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(variable, raising=False)
    _SignedIn.asked.clear()
    with HTTPServer(("127.0.0.1", 0), _SignedIn) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        monkeypatch.setenv("AWS_ENDPOINT_URL_SSO", f"http://127.0.0.1:{server.server_port}")
        storage = _profiled("sso")
        storage.put("a", b"1")
        assert storage.get("a") == b"1"
        server.shutdown()
        thread.join()
    assert set(_who(signed)) == {"SIGNEDIN"}
    assert {request.headers["x-amz-security-token"] for request in signed} == {
        f"{accounts.SECRET}session"
    }
    ((path, bearer),) = _SignedIn.asked
    assert "role_name=reader" in path
    assert bearer == "TOKEN"
    for text in (repr(storage), storage.url, pickle.dumps(storage).decode("latin-1")):
        assert accounts.SECRET not in text
        assert "TOKEN" not in text


@pytest.mark.usefixtures("profiles", "impatient", "signed")
def test_faults_of_profiles_are_told() -> None:
    with pytest.raises(InvalidArgumentError, match="there is no such profile"):
        _profiled("absent").get("a")
    with pytest.raises(StorageError, match="no valid credentials for the profile") as raised:
        _profiled("spoiled").get("a")
    assert accounts.SECRET not in str(raised.value)


def test_a_profile_needs_the_sdk(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "botocore" else real(name)
    )
    with pytest.raises(UnsupportedStorageError, match="pip install boto3"):
        _profiled("winds").get("a")
