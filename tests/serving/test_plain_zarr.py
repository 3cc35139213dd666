"""Any snapshot as plain Zarr over HTTP: what readers get, and never get."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from datetime import timedelta
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import google_crc32c
import numpy as np
import pytest
import xarray as xr
import zarr
from hypothesis import given
from hypothesis import strategies as st
from zarr.core.buffer.cpu import Buffer as CPUBuffer

import zarr_manifests as zm
from hostile_names import NAMES, hostile_repository, unchecked
from served import Answer, get, serving
from zarr_manifests.repository import resolved
from zarr_manifests.serving import answers, folder_links, values
from zarr_manifests.serving.http_ranges import RangeError, part_of
from zarr_manifests.serving.served import Room
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
    repo = zm.create("memory://served-plain", OBJECTS)
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


@pytest.mark.parametrize("consolidated", [None, False])
@pytest.mark.parametrize(
    ("version", "scale"), [("main", 2), ("v:1", 1), ("main~3", 1), ("ID", 2), ("SHORT", 2)]
)
def test_xarray_opens_any_version_over_http(
    repo: zm.Repository, url: str, version: str, scale: float, *, consolidated: bool | None
) -> None:
    head = resolved(repo, "main")
    version = {"ID": head, "SHORT": head[13:21]}.get(version, version)
    found = xr.open_zarr(f"{url}/zarr/{version}", consolidated=consolidated, chunks=None)
    xr.testing.assert_equal(found[["t"]], dataset(scale))


def test_a_group_below_is_consolidated_too(url: str) -> None:
    for place in (f"{url}/zarr/main/deep/er", f"{url}/zarr/main/deep/er/"):
        xr.testing.assert_equal(xr.open_zarr(place, chunks=None), dataset(3))
    found = xr.open_zarr(f"{url}/zarr/main", group="deep/er", chunks=None)
    xr.testing.assert_equal(found, dataset(3))
    root = json.loads(get(url, "/zarr/main/zarr.json").body)["consolidated_metadata"]["metadata"]
    assert {"t", "x", "y", "deep", "deep/er", "deep/er/t", "holes"} <= root.keys()
    below = json.loads(get(url, "/zarr/main/deep/zarr.json").body)["consolidated_metadata"]
    assert {"er", "er/t", "er/x", "er/y"} == below["metadata"].keys()
    # Documents of arrays are those that are stored.
    store = zm.open("memory://served-plain").readonly_session().store
    assert get(url, "/zarr/main/t/zarr.json").body == store.get_sync("t/zarr.json").to_bytes()


@pytest.mark.parametrize("consolidated", [None, False])
def test_format_2_is_served_with_its_own_consolidated_metadata(
    *, consolidated: bool | None
) -> None:
    repo = zm.create(f"memory://served-v2-{consolidated}", OBJECTS)
    with repo.transaction(message="format 2") as store:
        dataset().to_zarr(store, zarr_format=2, consolidated=False)
    with serving(repo) as url:
        place = f"{url}/zarr/main"
        found = xr.open_zarr(place, consolidated=consolidated, zarr_format=2, chunks=None)
        xr.testing.assert_equal(found, dataset())
        assert ".zmetadata" in links(get(url, "/zarr/main"))
        assert {"t/.zarray", "t/.zattrs", ".zgroup"} <= json.loads(
            get(url, "/zarr/main/.zmetadata").body
        )["metadata"].keys()


def test_nothing_is_stored_by_reading(repo: zm.Repository, url: str) -> None:
    before = {info.key for info in repo.storage.list()}
    xr.open_zarr(f"{url}/zarr/main", chunks=None).load()
    get(url, "/zarr/main/")
    assert {info.key for info in repo.storage.list()} == before


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


def test_a_chunk_that_is_missing_or_damaged_is_an_error_of_the_server(tmp_path: Path) -> None:
    repo = zm.create(tmp_path, OBJECTS)
    zm.write(dataset(), repo, message="values")
    objects = dict(zip(*chunk_objects(repo.readonly_session(), "t"), strict=True))
    (tmp_path / objects[0, 0]).unlink()
    damaged = tmp_path / objects[1, 1]
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    short = tmp_path / objects[0, 1]
    short.write_bytes(short.read_bytes()[:-1])
    with serving(repo) as url:
        for chunk in ("0/0", "1/1", "0/1"):
            for headers in ({}, {"Range": "bytes=0-3"}, {"Range": "bytes=0-"}):
                answer = get(url, f"/zarr/main/t/c/{chunk}", **headers)
                assert answer.status == 500, (chunk, headers)
                assert answer.headers["cache-control"] == "no-store"
        assert get(url, "/zarr/main/t/c/1/0").status == 200
        with pytest.raises(Exception, match="500"):
            xr.open_zarr(f"{url}/zarr/main", chunks=None).load()


def chunk_objects(session: zm.Session, path: str) -> tuple[Any, list[str]]:
    found = session.chunk_refs(path)
    return [*map(tuple, found.coords.tolist())], [found.locations[i] for i in found.source.tolist()]


def test_an_expired_snapshot_is_gone(tmp_path: Path) -> None:
    repo = zm.create(tmp_path, OBJECTS)
    zm.write(dataset(), repo, message="old")
    old = resolved(repo, "main")
    zm.write(dataset(2), repo, message="new", mode="w")
    with serving(repo) as url:
        assert get(url, f"/zarr/{old}/t/c/0/0").status == 200
        places = dict(zip(*chunk_objects(repo.readonly_session(old), "t"), strict=True))
        repo.expire_snapshots(keep_last=1)
        repo.garbage_collect(timedelta(0))
        (tmp_path / places[1, 0]).unlink()  # as the collection after a compaction
        # What is open already says so when it misses something; what is not, at once.
        assert get(url, f"/zarr/{old}/t/c/1/0").status == 410
    with serving(zm.open(tmp_path)) as url:
        assert get(url, f"/zarr/{old}/t/c/0/0").status == 410
        assert get(url, "/zarr/main/t/c/0/0").status == 200


def test_a_repository_that_is_away_is_not_empty(tmp_path: Path) -> None:
    repo = zm.create(tmp_path / "r", OBJECTS)
    zm.write(dataset(), repo, message="values")
    with serving(repo) as url:
        (tmp_path / "r").rename(tmp_path / "away")
        assert get(url, "/zarr/main/t/c/0/0").status in (410, 500, 503)
        assert get(url, "/zarr/main/zarr.json").status in (410, 500, 503)


# --- parts, etags, methods -----------------------------------------------------------------------


@pytest.mark.hypothesis
@given(
    total=st.integers(0, 12),
    text=st.one_of(
        st.tuples(st.integers(0, 14), st.integers(0, 14)).map(lambda p: f"{p[0]}-{p[1]}"),
        st.integers(0, 14).map(lambda n: f"{n}-"),
        st.integers(0, 14).map(lambda n: f"-{n}"),
        st.text("0123456789-, x", max_size=8),
        st.integers(10**17, 10**40).map(lambda n: f"{n}-{n + 1}"),
    ),
)
def test_a_range_is_what_the_standard_says(total: int, text: str) -> None:
    data = bytes(range(total))
    found = re.fullmatch(r" *(\d*)-(\d*) *", text)
    first, last = found.groups() if found else ("", "")
    sound = found and (first or last) and not (first and last and int(last) < int(first))
    if not sound:
        assert part_of(f"bytes={text}", total) is None
        return
    wanted = (
        data[int(first) : int(last) + 1 if last else None] if first else data[-int(last) or total :]
    )
    if not wanted:
        with pytest.raises(RangeError):
            part_of(f"bytes={text}", total)
        return
    start, end = part_of(f"bytes={text}", total)
    assert 0 <= start < end <= total
    assert data[start:end] == wanted


@pytest.mark.parametrize("key", ["t/c/0/0", "zarr.json", "t/zarr.json"])
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
    for text in (f"{n}-", f"{n + 3}-{n + 9}", "-0"):
        beyond = get(url, path, Range=f"bytes={text}")
        assert beyond.status == 416
        assert beyond.headers["content-range"] == f"bytes */{n}"
    for text in ("bytes=0-1,3-4", "bytes=3-1", "lines=0-1", "bytes=", "nonsense"):
        answer = get(url, path, Range=text)
        assert (answer.status, answer.body) == (200, data), text


def test_etags_say_whether_a_reader_has_the_value(repo: zm.Repository, url: str) -> None:
    for path in ("t/c/0/0", "zarr.json", "holes/"):
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
    for path in ("t/c/0/0", "zarr.json", "t/", "holes/c/1"):
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


@pytest.mark.parametrize("odd", [b"no JSON", b"[" * 200_000], ids=["text", "deep"])
def test_attributes_of_format_2_that_are_no_json_are_no_error(odd: bytes) -> None:
    repo = zm.create(f"memory://served-odd-attributes-{len(odd)}")
    with repo.transaction() as store:
        root = zarr.create_group(store, zarr_format=2)
        root.create_array("a", shape=(2,), dtype="f4")
        root.create_group("sound")
        store.set_sync("a/.zattrs", CPUBuffer.from_bytes(odd))
    with serving(repo) as url:
        assert get(url, "/zarr/main/.zmetadata").status == 404
        assert get(url, "/zarr/main/sound/.zmetadata").status == 200
        assert get(url, "/zarr/main/a/.zattrs").body == odd
        assert get(url, "/tree/main").status == 200
        assert get(url, "/array/main/a").status == 200
    assert "&lt;f4" in repo.readonly_session()._repr_html_()


def test_head_says_what_get_would(url: str) -> None:
    for path in ("t/c/0/0", "zarr.json", "t", "nothing", "holes/c/1"):
        one, other = get(url, f"/zarr/main/{path}"), get(url, f"/zarr/main/{path}", "HEAD")
        assert other.body == b""
        assert other.status == one.status
        ignored = {"date"}
        assert {k: v for k, v in other.headers.items() if k not in ignored} == {
            k: v for k, v in one.headers.items() if k not in ignored
        }


@pytest.mark.parametrize("method", ["PUT", "POST", "DELETE", "PATCH"])
def test_nothing_can_be_written(url: str, method: str) -> None:
    for path in ("/zarr/main/t/c/0/0", "/slice/main/t", "/"):
        assert get(url, path, method).status == 405


# --- large values --------------------------------------------------------------------------------


def test_a_large_value_is_read_in_pieces_and_checked_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(values, "PIECE_BYTES", 1000)
    monkeypatch.setattr(answers, "PIECE_BYTES", 1000)
    repo = zm.create(tmp_path, OBJECTS)
    data = np.random.default_rng(1).integers(0, 256, 10_500, dtype="u1")
    with repo.transaction(message="a large chunk") as store:
        one: dict[str, Any] = {"shape": (10_500,), "chunks": (10_500,), "dtype": "u1"}
        for name in "ab":
            zarr.create_array(store, name=name, compressors=None, **one)[:] = data
    (key,) = chunk_objects(repo.readonly_session(), "b")[1]
    (tmp_path / key).write_bytes(bytes(10_500))
    read: list[int] = []
    kept = values._read

    def counted(contents: Any, ref: Any, start: int, length: int) -> bytes:
        read.append(length)
        return kept(contents, ref, start, length)

    monkeypatch.setattr(values, "_read", counted)
    with serving(repo) as url:
        assert get(url, "/zarr/main/a/c/0").body == data.tobytes()
        assert sum(read) == 2 * 10_500, "it is read to check it, and to send it"
        assert get(url, "/zarr/main/a/c/0").body == data.tobytes()
        assert sum(read) == 3 * 10_500, "it is checked once"
        part = get(url, "/zarr/main/a/c/0", Range="bytes=500-2600")
        assert part.body == data[500:2601].tobytes()
        assert max(read) <= 1000
        assert get(url, "/zarr/main/b/c/0").status == 500
        assert get(url, "/zarr/main/b/c/0", Range="bytes=0-").status == 500


def test_requests_wait_for_room() -> None:
    held = most = 0

    async def request(room: Room, nbytes: int) -> None:
        nonlocal held, most
        async with room.hold(nbytes):
            held += min(nbytes, MIB)
            most = max(most, held)
            await asyncio.sleep(0)
            held -= min(nbytes, MIB)

    async def all_at_once() -> None:
        room = Room(MIB)
        sizes = [MIB // 3, MIB // 2, MIB, 9 * MIB, 100_000]
        await asyncio.gather(*(request(room, nbytes) for nbytes in sizes * 10))

    asyncio.run(asyncio.wait_for(all_at_once(), 60))
    assert held == 0
    assert MIB // 2 < most <= MIB


# --- folders -------------------------------------------------------------------------------------


def links(answer: Answer) -> list[str]:
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/html")
    return [unquote(unescape(found)) for found in re.findall(r'<a href="([^"]*)">', answer.text)]


def test_folders_answer_with_links(url: str) -> None:
    expected = {
        "": ["deep/", "holes/", "t/", "x/", "y/", "zarr.json"],
        "deep": ["er/", "zarr.json"],
        "t": ["c/", "zarr.json"],
        "t/c": ["0/", "1/"],
        "t/c/1": ["0", "1"],
        "holes/c": ["0"],
    }
    for path, names in expected.items():
        for end in ("", "/"):
            assert links(get(url, f"/zarr/main/{path}{end}")) == names
    for path in ("nothing", "t/c/7", "t/c/01", "t/d", "holes/c/1"):
        assert get(url, f"/zarr/main/{path}").status == 404, path


@pytest.mark.parametrize(
    ("keys", "names"),
    [
        ({"name": "default", "separator": "."}, ["c.0.0", "c.0.1", "zarr.json"]),
        ({"name": "v2", "separator": "."}, ["0.0", "0.1", "zarr.json"]),
        ({"name": "v2", "separator": "/"}, ["0/", "zarr.json"]),
    ],
)
def test_folders_name_chunks_as_the_array_does(keys: Any, names: list[str]) -> None:
    repo = zm.create(f"memory://served-keys-{keys['name']}{ord(keys['separator'])}")
    with repo.transaction(message="other names") as store:
        one: dict[str, Any] = {"shape": (4, 4), "chunks": (2, 2), "dtype": "i2"}
        zarr.create_array(store, name="a", chunk_key_encoding=keys, **one)[:2] = 1
    with serving(repo) as url:
        assert links(get(url, "/zarr/main/a")) == names


def test_a_chunk_that_was_never_written_is_no_folder_whatever_lies_below() -> None:
    repo = zm.create("memory://served-below")
    keys: Any = {"name": "v2", "separator": "/"}
    with repo.transaction(message="an array below the key of a chunk") as store:
        one: dict[str, Any] = {"shape": (2,), "chunks": (1,), "dtype": "i2", "fill_value": 7}
        array = zarr.create_array(store, name="a", chunk_key_encoding=keys, **one)
        array[1] = 5
        store.set_sync("a/0/zarr.json", store.get_sync("a/zarr.json"))
    with serving(repo) as url:
        assert get(url, "/zarr/main/a/0").status == 404
        assert links(get(url, "/zarr/main/a/0/")) == ["zarr.json"]
        found = zarr.open_array(f"{url}/zarr/main/a", mode="r")
        np.testing.assert_array_equal(found[:], [7, 5])


HOSTILE = ["a b", "ünï", 'q"uote', "<b>&amp;", "http_x", "50%", "#1", "a?b", "c;d", "x:y"]


def test_names_are_escaped_and_lead_to_what_they_name() -> None:
    repo = zm.create("memory://served-names")
    with repo.transaction(message="names") as store:
        for name in HOSTILE:
            zarr.create_array(store, name=name, shape=(1,), dtype="i2")
    with serving(repo) as url:
        page = get(url, "/zarr/main/")
        assert "<b>" not in page.text
        found = [link.removeprefix("./") for link in links(page)]
        assert {f"{name}/" for name in HOSTILE} | {"zarr.json"} == {*found}
        for name in HOSTILE:
            assert get(url, f"/zarr/main/{quote(name)}/zarr.json").status == 200
        # A group of names that fsspec takes as they are is listed without consolidated metadata.
        group = zarr.open_group(f"{url}/zarr/main", mode="r", use_consolidated=False)
        assert {"a b", "ünï", "http_x"} <= {*group}


@pytest.mark.parametrize("name", NAMES)
def test_names_that_lead_elsewhere_are_neither_read_nor_linked(tmp_path: Path, name: str) -> None:
    hostile_repository(tmp_path, f"{name}/zarr.json")
    with serving(zm.open(tmp_path)) as url:
        for page in ("/zarr/main/", "/zarr/main/zarr.json", "/tree/main"):
            answer = get(url, page)
            assert answer.status == 500
    with unchecked(), serving(zm.open(tmp_path)) as url:
        if name.partition("/")[0] in ("", ".", ".."):
            assert get(url, "/zarr/main/").status == 400
        if not name.startswith("/"):  # else it is no array
            assert get(url, "/tree/main").status == 400


def test_a_folder_of_too_many_chunks_is_not_listed_in_part(
    repo: zm.Repository, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_links, "_MOST_CHUNKS", 2)
    assert get(url, "/zarr/main/t/c").status == 501
    assert links(get(url, "/zarr/main/t/c/1")) == ["0", "1"]
    assert links(get(url, "/zarr/main/t")) == ["c/", "zarr.json"]


# --- no path leaves the repository ---------------------------------------------------------------

_SEGMENT = st.one_of(
    st.sampled_from(["..", ".", "", "t", "c", "0", "zarr.json", "deep", "%2e%2e", "%2f", "%00"]),
    st.sampled_from(["..%2f..", "%252e%252e", "..\\..", "etc", "passwd", "chunks", "current"]),
    st.text(st.characters(codec="utf-8"), max_size=4).map(lambda text: quote(text, safe="")),
)


@pytest.mark.hypothesis
@given(st.lists(_SEGMENT, max_size=6), st.sampled_from(["", "/", "//"]))
def test_a_path_gives_what_the_store_gives_or_an_error(
    url: str, repo: zm.Repository, segments: list[str], end: str
) -> None:
    path = "/".join(segments) + end
    answer = get(url, "/zarr/main/" + quote(path, safe="%/"))
    key = unquote(quote(path, safe="%/"))
    assert answer.status in (200, 400, 404), key
    if answer.status != 200 or answer.headers["content-type"].startswith("text/html"):
        return
    stored = repo.readonly_session().store.get_sync(key)
    assert stored is not None, key
    if not key.endswith("zarr.json"):
        assert answer.body == stored.to_bytes()


@pytest.mark.parametrize(
    "path",
    ["/static/../app.py", "/static/%2e%2e/app.py", "/static/..%2fapp.py", "/static//etc/passwd"],
)
def test_static_files_are_those_of_their_folder(url: str, path: str) -> None:
    assert get(url, path).status == 404


def test_keys_of_objects_are_not_keys_of_the_store(repo: zm.Repository, url: str) -> None:
    assert isinstance(repo.storage, MemoryStorage)
    for info in repo.storage.list():
        assert get(url, f"/zarr/main/{info.key}").status == 404


def test_a_link_has_no_character_that_turns_text_around() -> None:
    repo = zm.create("memory://served-turned")
    with repo.transaction(message="odd names") as store:
        zarr.create_group(store, path="a\u202eb\x9bc")
    with serving(repo) as url:
        answer = get(url, "/zarr/main/")
    assert links(answer) == ["a\u202eb\x9bc/", "zarr.json"]
    assert not {"\u202e", "\x9b"} & {*answer.text}
