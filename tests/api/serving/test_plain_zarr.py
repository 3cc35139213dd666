"""Any snapshot as plain Zarr over HTTP: what readers get, and never get."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import google_crc32c
import numpy as np
import pytest
import xarray as xr
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

import zarr_manifests as zm
from effort import examples
from hostile_names import NAMES, hostile_repository, unchecked
from served import get, serving
from zarr_manifests.repository import resolved
from zarr_manifests.serving import answers, create_app
from zarr_manifests.storage.memory import MemoryStorage

IMMUTABLE = "max-age=31536000, immutable"
MIB = 1024**2
OBJECTS = {"inline-chunk-bytes": 0, "pack-chunk-bytes": 0}


def dataset(scale: float = 1.0) -> xr.Dataset:
    values = scale * np.arange(24, dtype="f4").reshape(4, 6)
    return xr.Dataset(
        {"t": (("y", "x"), values)}, {"y": [10, 20, 30, 40], "x": np.arange(6.0)}
    ).chunk(y=2, x=3)


@pytest.fixture(scope="module")
def repo() -> zm.Repository:
    repo = zm.create(MemoryStorage(), OBJECTS)
    zm.write(dataset(), repo, message="first")
    repo.create_tag("v/1")
    zm.write(dataset(2), repo, message="second", mode="w")
    zm.write(dataset(3), repo, message="a group", group="deep/er")
    with repo.transaction(message="chunks that were never written") as store:
        one: dict[str, Any] = {"shape": (4,), "chunks": (2,), "dtype": "i2", "fill_value": 7}
        zarr.create_array(store, name="holes", dimension_names=("z",), **one)
        zarr.open_array(store, path="holes")[:2] = 1
    return repo


@pytest.fixture(scope="module")
def url(repo: zm.Repository) -> Iterator[str]:
    with serving(repo) as found:
        yield found


# --- statuses ----------------------------------------------------------------------------------


def test_not_found_means_never_written_and_nothing_else(repo: zm.Repository, url: str) -> None:
    repo.create_branch("gone/soon")
    assert get(url, "/zarr/gone:soon/t/c/0/0").status == 200
    repo.delete_branch("gone/soon")
    expected = {
        "/zarr/main/holes/c/0": 200,
        "/zarr/main/holes/c/1": 404,
        "/zarr/main/nothing/zarr.json": 404,
        "/zarr/main/t/c/0/00": 404,
        "/zarr/gone:soon/t/c/0/0": 410,
        "/zarr/000000000001-0123456789abcdef01234567-0/t/c/0/0": 410,
        "/zarr/main~99/t/c/0/0": 410,
        "/zarr/main@%7B2026-99%7D/t/c/0/0": 400,
        "/zarr/main/t/c/../zarr.json": 400,
        "/elsewhere": 404,
    }
    assert {path: get(url, path).status for path in expected} == expected
    gone = "there is no such version, or it has expired: the first page of the server lists them\n"
    assert {get(url, path).text for path, status in expected.items() if status == 410} == {gone}


def chunk_objects(session: zm.Session, path: str) -> tuple[Any, list[str]]:
    found = session.chunk_refs(path)
    return [*map(tuple, found.coords.tolist())], [found.locations[i] for i in found.source.tolist()]


# --- parts, etags, methods -----------------------------------------------------------------------


@pytest.mark.parametrize("key", ["t/c/0/0", "zarr.json"])
def test_parts_of_values(url: str, key: str) -> None:
    path = f"/zarr/main/{key}"
    whole = get(url, path)
    data, n = whole.body, len(whole.body)
    assert whole.status == 200
    assert whole.headers["accept-ranges"] == "bytes"
    assert int(whole.headers["content-length"]) == n
    for text, part in {
        "0-3": (0, 4), "5-": (5, n), "-4": (n - 4, n), f"0-{n + 5}": (0, n), f"-{n + 9}": (0, n)
    }.items():  # fmt: skip
        answer = get(url, path, Range=f"bytes={text}")
        assert answer.status == 206
        assert answer.body == data[slice(*part)]
        assert answer.headers["content-range"] == f"bytes {part[0]}-{part[1] - 1}/{n}"
        assert answer.headers["etag"] == whole.headers["etag"]
    for text in (f"{n}-", "-0"):
        beyond = get(url, path, Range=f"bytes={text}")
        assert beyond.status == 416
        assert beyond.headers["content-range"] == f"bytes */{n}"
    for text in ("bytes=0-1,3-4", "bytes=3-1", "lines=0-1", f"bytes=0-{'9' * 40}x", "nonsense"):
        answer = get(url, path, Range=text)
        assert (answer.status, answer.body) == (200, data), text
    head = get(url, path, "HEAD")
    assert (head.status, head.body, head.headers["etag"]) == (200, b"", whole.headers["etag"])


def test_etags_say_whether_a_reader_has_the_value(repo: zm.Repository, url: str) -> None:
    for path in ("t/c/0/0", "zarr.json", "holes/zarr.json"):
        whole = get(url, f"/zarr/main/{path}")
        etag = whole.headers["etag"]
        for given_etag in (etag, f'"other", W/{etag}', "*"):
            again = get(url, f"/zarr/main/{path}", If_None_Match=given_etag)
            assert (again.status, again.body) == (304, b"")
            assert again.headers["etag"] == etag
        assert get(url, f"/zarr/main/{path}", If_None_Match='"other"').status == 200
    etag = get(url, "/zarr/main/t/c/0/0").headers["etag"]
    assert get(url, "/zarr/main/t/c/0/0", Range="bytes=0-1", If_Range=etag).status == 206
    assert get(url, "/zarr/main/t/c/0/0", Range="bytes=0-1", If_Range='"other"').status == 200
    # Equal chunks of two versions are one object, others are not.
    assert get(url, "/zarr/main~1/t/c/0/0").headers["etag"] == etag
    assert get(url, "/zarr/v:1/t/c/0/0").headers["etag"] != etag


def test_only_what_an_id_names_is_kept_for_ever(repo: zm.Repository, url: str) -> None:
    head = resolved(repo, "main")
    for path in ("t/c/0/0", "zarr.json", "t", "holes/c/1"):
        assert get(url, f"/zarr/{head}/{path}").headers["cache-control"] == IMMUTABLE, path
        for version in ("main", "v:1", "main~1", head[13:21]):
            assert get(url, f"/zarr/{version}/{path}").headers["cache-control"] == "no-cache"


def test_what_may_change_elsewhere_is_never_kept(tmp_path: Path) -> None:
    data, chunk = tmp_path / "a.bin", bytes(range(8))
    data.write_bytes(chunk)
    repo = zm.create("memory://served-elsewhere", virtual_containers={"raw": tmp_path})
    with repo.transaction(message="a reference that says only what the whole chunk is") as store:
        one: dict[str, Any] = {"shape": (8,), "chunks": (8,), "dtype": "u1", "compressors": None}
        for name, checksum in (("checked", google_crc32c.value(chunk)), ("unchecked", -1)):
            zarr.create_array(store, name=name, **one)
            where: Any = ["virtual://raw/a.bin"], [0], [0], [8]
            store.set_virtual_refs(name, [[0]], *where, checksums=[checksum])
    snapshot = resolved(repo, "main")
    part = {"Range": "bytes=2-4"}
    with serving(repo) as url:
        for path in ("zarr/{}/checked/c/0", "zarr/{}/unchecked/c/0", "slice/{}/unchecked"):
            answer = get(url, f"/{path.format(snapshot)}")
            assert (answer.status, answer.headers["cache-control"]) == (200, "no-cache"), path
            assert "etag" not in answer.headers
        assert get(url, f"/zarr/{snapshot}/checked/c/0", **part).body == chunk[2:5]
        data.write_bytes(b"differs!")
        assert get(url, f"/zarr/{snapshot}/checked/c/0", **part).status == 500


# --- large values --------------------------------------------------------------------------------


def test_a_large_value_is_checked_before_any_of_it_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "PIECE_BYTES", 1000)
    repo = zm.create(tmp_path, OBJECTS)
    data = np.random.default_rng(1).integers(0, 256, 10_500, dtype="u1")
    with repo.transaction(message="a large chunk") as store:
        one: dict[str, Any] = {"shape": (10_500,), "chunks": (10_500,), "dtype": "u1"}
        for name in "ab":
            zarr.create_array(store, name=name, compressors=None, **one)[:] = data
    (key,) = chunk_objects(repo.readonly_session(), "b")[1]
    (tmp_path / key).write_bytes(bytes(10_500))
    with serving(repo) as url:
        assert get(url, "/zarr/main/a/c/0").body == data.tobytes()
        part = get(url, "/zarr/main/a/c/0", Range="bytes=500-2600")
        assert part.body == data[500:2601].tobytes()
        assert get(url, "/zarr/main/b/c/0").status == 500
        assert get(url, "/zarr/main/b/c/0", Range="bytes=0-").status == 500


def test_few_requests_hold_large_values_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "_PIECES", 2)
    repo = zm.create(MemoryStorage(), OBJECTS)
    with repo.transaction(message="large") as store:
        one: dict[str, Any] = {"shape": (MIB,), "chunks": (MIB,), "dtype": "u1"}
        zarr.create_array(store, name="a", compressors=None, **one)[:] = 1
    held = most = 0
    two_at_once = asyncio.Event()

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        nonlocal held, most
        if message["type"] == "http.response.start":
            held += 1
            most = max(most, held)
            if held == 2:
                two_at_once.set()
            await asyncio.wait_for(two_at_once.wait(), 60)
        elif not message.get("more_body"):
            held -= 1
        await asyncio.sleep(0)

    async def all_at_once() -> None:
        app, path = create_app(repo), "/zarr/main/a/c/0"
        scope = {"type": "http", "method": "GET", "path": path, "raw_path": path.encode()}
        scope |= {"query_string": b"", "headers": [(b"host", b"localhost")]}
        await asyncio.gather(*(app(dict(scope), receive, send) for _ in range(10)))

    asyncio.run(all_at_once())
    assert (held, most) == (0, 2)


# --- no path leaves the repository ---------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_names_that_lead_elsewhere_are_not_read(tmp_path: Path, name: str) -> None:
    hostile_repository(tmp_path, f"{name}/zarr.json")
    with serving(zm.open(tmp_path)) as url:
        for page in ("/zarr/main/zarr.json", "/tree/main"):
            answer = get(url, page)
            assert answer.status == 500
    with unchecked(), serving(zm.open(tmp_path)) as url:
        if not name.startswith("/"):  # else it is no array
            assert get(url, "/tree/main").status == 400


_SEGMENT = st.one_of(
    st.sampled_from(["..", ".", "", "t", "c", "0", "zarr.json", "deep", "%2e%2e", "%2f", "%00"]),
    st.sampled_from(["..%2f..", "%252e%252e", "..\\..", "etc", "passwd", "chunks", "current"]),
    st.text(st.characters(codec="utf-8"), max_size=4).map(lambda text: quote(text, safe="")),
)


@settings(max_examples=examples(25))
@given(st.lists(_SEGMENT, max_size=6), st.sampled_from(["", "/", "//"]))
def test_a_path_gives_what_the_store_gives_or_an_error(
    url: str, repo: zm.Repository, segments: list[str], end: str
) -> None:
    path = "/".join(segments) + end
    answer = get(url, "/zarr/main/" + quote(path, safe="%/"))
    key = unquote(quote(path, safe="%/"))
    assert answer.status in (200, 400, 404), key
    if answer.status != 200:
        return
    stored = repo.readonly_session().store.get_sync(key)
    assert stored is not None, key
    if not key.endswith("zarr.json"):
        assert answer.body == stored.to_bytes()


def test_a_storage_that_fails_is_no_absent_chunk(tmp_path: Path) -> None:
    repo = zm.create(tmp_path, OBJECTS)
    zm.write(dataset(), repo, message="values")
    objects = dict(zip(*chunk_objects(repo.readonly_session(), "t"), strict=True))
    place = tmp_path / objects[0, 0]
    place.unlink()
    os.mkfifo(place)
    with serving(repo) as url:
        assert get(url, "/zarr/main/t/c/0/0").status == 503
        assert get(url, "/zarr/main/t/c/1/0").status == 200
