"""Who may read, what every answer says to browsers, and what ends up in no log."""

from __future__ import annotations

import base64
import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import zarr
from typer.testing import CliRunner

import zarr_manifests as zm
from served import get, running, serving
from zarr_manifests.cli import app
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.serving import create_app, serve
from zarr_manifests.storage.memory import MemoryStorage

TOKEN = "a-secret: été"


@pytest.fixture(scope="module")
def repo() -> zm.Repository:
    repo = zm.create(MemoryStorage())
    with repo.transaction(message="values") as store:
        zarr.create_array(store, name="a", shape=(4,), chunks=(2,), dtype="i2")[:] = 7
    return repo


@pytest.fixture(scope="module")
def url(repo: zm.Repository) -> Iterator[str]:
    with serving(repo) as found:
        yield found


def basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


def test_a_token_is_asked_for_everywhere_and_shown_nowhere(
    repo: zm.Repository, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    paths = ["/", "/zarr/main/a/zarr.json", "/zarr/main/a/c/0", "/slice/main/a", "/static/x", "/no"]
    refused = [
        {},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer other"},
        {"Authorization": f"Bearer {TOKEN[:-1]}".encode().decode("latin-1")},
        {"Authorization": basic("any", "other")},
        {"Authorization": basic(TOKEN, "")},
        {"Authorization": "Basic ???"},
        {"Authorization": "Digest x"},
    ]
    given = [
        {"Authorization": f"Bearer {TOKEN}".encode().decode("latin-1")},
        {"Authorization": basic("", TOKEN)},
        {"authorization": basic("any", TOKEN)},
    ]
    with running(create_app(repo, token=TOKEN), access_log=True, log_level="trace") as url:
        for path in paths:
            for headers in refused:
                answer = get(url, path, **headers)
                assert answer.status == 401, headers
                assert answer.headers["www-authenticate"].startswith("Basic ")
        for headers in given:
            assert get(url, "/zarr/main/a/c/0", **headers).status == 200
        found = zarr.open_array(
            f"{url}/zarr/main/a",
            mode="r",
            storage_options={"headers": {"Authorization": basic("", TOKEN)}},
        )
        np.testing.assert_array_equal(found[:], 7)
    assert TOKEN not in caplog.text
    assert base64.b64encode(f":{TOKEN}".encode()).decode() not in caplog.text


def test_only_names_of_this_machine_are_answered(repo: zm.Repository, url: str) -> None:
    """Else a page elsewhere could give this address a name of its own, and read."""
    port = url.rpartition(":")[2]
    for host in ("localhost", f"localhost:{port}", f"127.0.0.1:{port}", "[::1]:80", "LOCALHOST"):
        assert get(url, "/zarr/main/a/c/0", Host=host).status == 200, host
    for host in ("evil.example", "127.0.0.1.evil.example", "", "[::1"):
        assert get(url, "/zarr/main/a/c/0", Host=host).status in (400, 421), host
    with serving(repo, hosts=None) as other:
        assert get(other, "/zarr/main/a/c/0", Host="data.example").status == 200
    with serving(repo, hosts=["data.example"]) as other:
        assert get(other, "/zarr/main/a/c/0", Host="data.example:80").status == 200
        assert get(other, "/zarr/main/a/c/0", Host="localhost").status == 421


def test_pages_of_other_origins_may_not_read(repo: zm.Repository, url: str) -> None:
    def may_read(server: str, origin: str) -> bool:
        headers = get(server, "/zarr/main/a/c/0", Origin=origin).headers
        return headers.get("access-control-allow-origin") in (origin, "*")

    for origin in ("http://localhost:3000", "https://127.0.0.1", "http://[::1]:80"):
        assert may_read(url, origin), origin
    for origin in ("https://viewer.example", "http://localhost.viewer.example", "null"):
        assert not may_read(url, origin), origin
    with serving(repo, origins=["https://viewer.example"]) as other:
        assert may_read(other, "https://viewer.example")
        assert not may_read(other, "https://other.example")


def test_every_answer_says_what_browsers_must_not_do(url: str) -> None:
    paths = ["/", "/zarr/main/a/c/0", "/zarr/main/a/c/1x", "/zarr/main", "/slice/main/a", "/no"]
    for path in paths:
        headers = get(url, path).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
    assert get(url, "/", Host="evil.example").headers["x-content-type-options"] == "nosniff"


# --- the command line ----------------------------------------------------------------------------


def test_a_host_that_others_reach_needs_a_token(repo: zm.Repository) -> None:
    def stop(url: str) -> None:
        raise KeyboardInterrupt

    for host in ("0.0.0.0", "::", "data.example"):
        with pytest.raises(InvalidArgumentError, match="give a token"):
            serve(repo, host, 0, started=stop)


def test_an_address_that_is_taken_is_named(repo: zm.Repository, url: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"cannot listen on 127\.0\.0\.1 port \d+"):
        serve(repo, port=int(url.rpartition(":")[2]))
    with pytest.raises(InvalidArgumentError, match="cannot listen"):
        serve(repo, "no such host.invalid", 0, token="x")


def test_errors_of_the_command_are_one_line(tmp_path: Path) -> None:
    zm.create(tmp_path / "r")
    for words, code in [
        (["serve", str(tmp_path / "nothing")], 1),
        (["serve", str(tmp_path / "r"), "--host", "0.0.0.0"], 2),
        (["serve", str(tmp_path / "r"), "--token", ""], 2),
    ]:
        result = CliRunner().invoke(app, words, env={"ZARR_MANIFESTS_TOKEN": ""})
        assert result.exit_code == code, result.output
        assert result.stderr.startswith("error: ")
        assert result.stderr.count("\n") == 1
