"""URLs: what they open, and what is refused without being repeated."""

from pathlib import Path

import pytest

from zarr_manifests.errors import ConfigError, InvalidArgumentError, UnsupportedStorageError
from zarr_manifests.storage import LocalStorage, MemoryStorage, from_url


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


@pytest.mark.parametrize("scheme", ["abfs", "sftp", "FTP"])
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
