"""URLs: what they open, and what is refused without being repeated."""

import pickle
from collections.abc import ItemsView, Iterator
from pathlib import Path
from typing import Any

import pytest

import accounts
from zarr_manifests.error_cases import ConfigError, UnsupportedStorageError
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.storage import from_url
from zarr_manifests.storage.local import LocalStorage
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.storage.object_store import ObjectStorage
from zarr_manifests.storage.url import environment_mark, parse_options


def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/net/somebody")
    for given, path in {
        "data": f"{tmp_path}/data",
        "a/../b": f"{tmp_path}/b",
        "~/data": "/net/somebody/data",
        "/x@y:z/data": "/x@y:z/data",
        "./s3:/x": f"{tmp_path}/s3:/x",
    }.items():
        for url in (given, Path(given)) if "s3" not in given else (given,):
            storage = from_url(url)
            assert isinstance(storage, LocalStorage)
            assert storage.path == path


@pytest.mark.parametrize(
    "url", ["file:///a%20b/c%25", "FILE:///a%20b/c%25", "file://localhost/a b/c%25"]
)
def test_file_urls_are_decoded(url: str) -> None:
    storage = from_url(url)
    assert isinstance(storage, LocalStorage)
    assert storage.path == "/a b/c%"


def test_a_relative_path_is_resolved_when_it_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    storage = from_url("data")
    monkeypatch.chdir("/")
    storage.create("a", b"1")
    assert (tmp_path / "data" / "a").read_bytes() == b"1"


def test_memory_is_shared_by_name() -> None:
    storage = from_url("memory://test-url")
    assert isinstance(storage, MemoryStorage)
    storage.put("a", b"1")
    assert from_url("memory://test-url").get("a") == b"1"
    assert list(from_url("memory://test-url-2").list()) == []
    assert list(MemoryStorage().list()) == []


@pytest.mark.parametrize(
    ("given", "url", "options"),
    [
        ("s3a://bucket/winds/", "s3://bucket/winds", ()),
        ("S3A://bucket", "s3://bucket", ()),
        ("gcs://bucket/winds", "gs://bucket/winds", ()),
        ("abfs://box@alice.dfs.core.windows.net/winds", "az://box/winds", (("account", "alice"),)),
        ("abfss://box@alice.blob.core.windows.net", "az://box", (("account", "alice"),)),
    ],
)
def test_schemes_mean_what_they_mean_in_spark(given: str, url: str, options: Any) -> None:
    storage = from_url(given)
    assert isinstance(storage, ObjectStorage)
    assert storage.url == url
    assert storage.place == from_url(url, **dict(options)).place  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="regoin: unknown storage option; s3:// takes"):
        from_url("s3a://bucket", regoin="eu-west-1")


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [("endpoint_url", "endpoint"), ("region_name", "region"), ("anon", "anonymous")],
)
def test_names_of_other_packages_are_understood(theirs: str, ours: str) -> None:
    with pytest.raises(ConfigError, match=f"{theirs}: unknown .*; did you mean {ours}\\?"):
        from_url("s3://bucket", **{theirs: "x"})


def test_an_account_is_said_once() -> None:
    with pytest.raises(ConfigError, match="another than the one in the URL"):
        from_url("abfss://box@alice.dfs.core.windows.net/winds", account="bob")
    with pytest.raises(InvalidArgumentError, match="user or password") as error:
        from_url("abfss://box@alice:geheim.dfs.core.windows.net/winds")
    assert "geheim" not in str(error.value)


GOOD = {
    "retries": (0, 3, 100),
    "timeout_s": (1, 0.5, 86400),
    "connect_timeout_s": (1, 2.5),
    "concurrency": (1, 10000),
    "headers": ({}, {"x-team": "winds", "x-amz-server-side-encryption-aws-kms-key-id": "1"}),
    "requester_pays": (True, False),
    "storage_class": ("STANDARD_IA",),
    "profile": ("winds",),
}
BAD = {
    "retries": (-1, 1.5, True, "3", 101),
    "timeout_s": (0, -1, float("nan"), float("inf"), "5", True),
    "connect_timeout_s": (0, 10**9, None),
    "concurrency": (0, 1.0, False, "8"),
    "headers": (
        *({name: "geheim"} for name in ("Authorization", "Cookie", "x-api-key", "X-Auth-Token")),
        *({name: "geheim"} for name in ("", "a b", "a:b", "\n", "é")),
        *({"x-team": value} for value in ("geheim\r\nx: y", "gehéim", 5, None)),
        *("geheim", 5, [("x-team", "geheim")], {5: "geheim"}),
    ),
    "requester_pays": ("true", 1),
    "storage_class": (5, True),
    "profile": (5,),
}


def test_values_of_options() -> None:
    for name, values in GOOD.items():
        for value in values:
            storage = from_url("s3://bucket", **{name: value})
            assert pickle.loads(pickle.dumps(storage)).place == storage.place  # type: ignore[attr-defined]
    for name, values in BAD.items():
        for value in values:
            with pytest.raises(ConfigError) as error:
                from_url("s3://bucket", **{name: value})
            assert [problem.split(":")[0] for problem in error.value.problems] == [name]
            assert "geheim" not in str(error.value)


def test_options_are_read_from_text() -> None:
    texts = {
        "region": "eu-west-1",
        "allow_http": "True",
        "anonymous": "false",
        "retries": "3",
        "timeout_s": "2.5",
        "concurrency": "8",
        "headers": '{"x-team": "winds"}',
        "credentials": "accounts:alice",
    }
    assert parse_options("s3a://bucket", texts) == {
        "region": "eu-west-1",
        "allow_http": True,
        "anonymous": False,
        "retries": 3,
        "timeout_s": 2.5,
        "concurrency": 8,
        "headers": {"x-team": "winds"},
        "credentials": accounts.alice,
    }
    assert parse_options("/data", {"force": "true"}) == {"force": True}
    faults = {"allow_http": "yes", "retries": "x", "timeout_s": "x", "headers": "[geheim"}
    with pytest.raises(ConfigError) as error:
        parse_options("s3://bucket", faults)
    assert [problem.split(":")[0] for problem in error.value.problems] == list(faults)
    assert "geheim" not in str(error.value)
    with pytest.raises(ConfigError, match="regoin: unknown storage option"):
        parse_options("s3://bucket", {"regoin": "eu-west-1"})
    with pytest.raises(ConfigError, match="secret_access_key: a secret cannot be"):
        parse_options("s3://bucket", {"secret_access_key": "geheim"})
    for name in ("accounts", "accounts:", ":alice", "accounts:nobody", "accounts:SECRET", "no.x:y"):
        with pytest.raises(InvalidArgumentError, match="cannot be imported in this process"):
            parse_options("s3://bucket", {"credentials": name})


@pytest.mark.parametrize("scheme", ["wasbs", "sftp", "FTP"])
def test_other_schemes_are_named(scheme: str) -> None:
    with pytest.raises(UnsupportedStorageError) as error:
        from_url(f"{scheme}://bucket/key?token=geheim")
    assert f"{scheme.lower()}:// is not supported" in str(error.value)
    assert "file://" in str(error.value)
    assert "geheim" not in str(error.value)


@pytest.mark.parametrize(
    "url", ["s3://me:geheim@bucket/x", "file://geheim@host/x", "memory://a:geheim@b"]
)
def test_credentials_are_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(InvalidArgumentError, match="user or password") as error:
        from_url(url)
    assert "geheim" not in str(error.value)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("", "not the path"),
        ("a\0b", "not the path"),
        ("file://", "absolute path"),
        ("file://elsewhere/x", "absolute path"),
        ("memory://", "needs a name"),
        ("memory://../x", "refused"),
        ("memory:name", "two slashes"),
        (Path("s3://bucket/x"), "two slashes"),
        ("file:/x", "two slashes"),
    ],
)
def test_malformed_urls(url: str | Path, says: str) -> None:
    with pytest.raises(InvalidArgumentError, match=says):
        from_url(url)


def test_all_option_faults_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        from_url("/data", forse=True, region="eu", force="yes")
    assert [problem.split(":")[0] for problem in error.value.problems] == [
        "forse",
        "region",
        "force",
    ]
    assert "takes force" in str(error.value)
    with pytest.raises(ConfigError, match=r"force: unknown storage option; .* takes no options"):
        from_url("memory://x", force=True)


@pytest.mark.usefixtures("network_disk")
def test_force_is_passed_on(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedStorageError, match="nfs4"):
        from_url(tmp_path).create("a", b"1")
    assert from_url(str(tmp_path), force=True).create("a", b"1")


def test_variables_may_go_while_they_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    class Losing(dict[str, str]):
        """An environment from which another thread removes a variable that was just listed."""

        def __iter__(self) -> Iterator[str]:
            yield from ["AWS_GONE", *super().__iter__()]

        def items(self) -> Any:
            return ItemsView(self)

    before = Losing(AWS_REGION="a")
    with monkeypatch.context() as patched:
        patched.setattr("os.environ", before)
        mark = environment_mark()
        before["AWS_REGION"] = "b"
        assert environment_mark() != mark
