"""Zarr keys and documents."""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from effort import examples
from zarr_manifests.grid import Box
from zarr_manifests.keys import (
    ArrayMeta,
    ChunkKeys,
    GroupMeta,
    document_path,
    join,
    parse_document,
    split,
)

ENCODINGS = [ChunkKeys(kind, sep) for kind in ("default", "v2") for sep in ("/", ".")]  # type: ignore[arg-type]


def document(**changes: Any) -> bytes:
    fields: dict[str, Any] = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [7, 9],
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [2, 3]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "dimension_names": ["y", None],
    }
    fields |= changes
    return json.dumps({k: v for k, v in fields.items() if v != "left out"}).encode()


# --- keys ------------------------------------------------------------------------------------


@pytest.mark.parametrize("keys", ENCODINGS)
@given(coords=st.lists(st.integers(0, 2**62), max_size=4).map(tuple))
def test_chunk_keys_round_trip(keys: ChunkKeys, coords: tuple[int, ...]) -> None:
    assert keys.decode(keys.encode(coords), len(coords)) == coords


@pytest.mark.parametrize("keys", ENCODINGS)
@settings(max_examples=examples(300))
@given(rest=st.text(st.sampled_from("c/.0123+- \n٣"), max_size=8), ndim=st.integers(0, 3))
def test_only_the_canonical_key_is_a_chunk(keys: ChunkKeys, rest: str, ndim: int) -> None:
    coords = keys.decode(rest, ndim)
    if coords is not None:
        assert keys.encode(coords) == rest
        assert len(coords) == ndim


@pytest.mark.parametrize("keys", ENCODINGS)
def test_encoding_is_that_of_zarr(keys: ChunkKeys) -> None:
    array = zarr.create_array(
        zarr.storage.MemoryStore(),
        shape=(40, 30),
        chunks=(2, 2),
        dtype="u1",
        chunk_key_encoding={"name": keys.kind, "separator": keys.separator},
    )
    metadata = array.metadata
    assert metadata.encode_chunk_key((12, 3)) == keys.encode((12, 3))
    assert metadata.encode_chunk_key((0, 0)) == keys.encode((0, 0))


@pytest.mark.parametrize(
    ("rest", "ndim"),
    [
        ("c/01", 1),
        ("c/+1", 1),
        ("c/-1", 1),
        ("c/ 1", 1),
        ("c/1\n", 1),
        ("c/1_0", 1),
        ("c/٣", 1),
        ("c/1/", 1),
        ("c//1", 2),
        ("c/1", 2),
        ("c", 1),
        ("c/", 0),
        ("C/1", 1),
        ("1", 1),
        ("c/" + "9" * 20, 1),
    ],
)
def test_what_looks_like_a_chunk_key_and_is_none(rest: str, ndim: int) -> None:
    assert ChunkKeys("default", "/").decode(rest, ndim) is None


def test_document_paths() -> None:
    assert document_path("zarr.json") == ""
    assert document_path("a/b/zarr.json") == "a/b"
    assert document_path("a/zarr.json/") is None
    assert document_path("a/xzarr.json") is None
    assert [document_path(f"a/{name}") for name in (".zarray", ".zgroup", ".zattrs")] == ["a"] * 3
    assert document_path("a/.zmetadata") is None
    assert document_path("/zarr.json") is None


def test_join_and_split() -> None:
    for path, name in (("", "a"), ("a", "b"), ("a/b", "c")):
        assert split(join(path, name)) == (path, name)


# --- documents -------------------------------------------------------------------------------


def test_an_array() -> None:
    meta = parse_document(document())
    assert meta == ArrayMeta((7, 9), (2, 3), ChunkKeys("default", "/"), ("y", None))
    assert isinstance(meta, ArrayMeta)
    assert meta.grid == Box((0, 0), (4, 3))
    assert not meta.is_coordinate("a/y")


def test_a_group() -> None:
    assert parse_document(b'{"zarr_format": 3, "node_type": "group"}') == GroupMeta()
    assert parse_document(document(node_type="group")) == GroupMeta()


def test_encodings_and_their_defaults() -> None:
    for encoding, expected in (
        ("default", ChunkKeys("default", "/")),
        ("v2", ChunkKeys("v2", ".")),
        ({"name": "default"}, ChunkKeys("default", "/")),
        ({"name": "v2", "configuration": {}}, ChunkKeys("v2", ".")),
        ({"name": "v2", "configuration": {"separator": "/"}}, ChunkKeys("v2", "/")),
    ):
        meta = parse_document(document(chunk_key_encoding=encoding))
        assert isinstance(meta, ArrayMeta)
        assert meta.chunk_keys == expected


def test_scalars_and_empty_arrays() -> None:
    grid = {"name": "regular", "configuration": {"chunk_shape": []}}
    scalar = parse_document(document(shape=[], chunk_grid=grid, dimension_names=None))
    assert isinstance(scalar, ArrayMeta)
    assert () in scalar.grid
    empty = parse_document(document(shape=[0, 9]))
    assert isinstance(empty, ArrayMeta)
    assert empty.grid.size == 0


def test_coordinates() -> None:
    grid = {"name": "regular", "configuration": {"chunk_shape": [2]}}
    meta = parse_document(document(shape=[7], chunk_grid=grid, dimension_names=["lat"]))
    assert isinstance(meta, ArrayMeta)
    assert meta.is_coordinate("lat")
    assert meta.is_coordinate("air/lat")
    assert not meta.is_coordinate("lon")


def test_same_chunking() -> None:
    one, grown = parse_document(document()), parse_document(document(shape=[70, 9]))
    other = parse_document(document(chunk_key_encoding="v2"))
    assert isinstance(one, ArrayMeta)
    assert one.same_chunking(grown)
    assert not one.same_chunking(other)
    assert not one.same_chunking(GroupMeta())
    assert not one.same_chunking(None)


_GRID = {"name": "regular", "configuration": {"chunk_shape": [2, 3]}}


@pytest.mark.parametrize(
    "changes",
    [
        {"zarr_format": 2},
        {"zarr_format": "3"},
        {"zarr_format": "left out"},
        {"node_type": "table"},
        {"node_type": None},
        {"shape": "left out"},
        {"shape": [7]},
        {"shape": [7, -1]},
        {"shape": [7, 9.0]},
        {"shape": [7, True]},
        {"shape": [7, 2**63]},
        {"shape": [2**62, 2**62]},
        {"shape": 7},
        {"shape": None},
        {"shape": "ab"},
        {"shape": {"a": 1, "b": 2}},
        {"chunk_grid": "left out"},
        {"chunk_grid": "regular"},
        {"chunk_grid": _GRID | {"name": "rectangular"}},
        {"chunk_grid": _GRID | {"configuration": None}},
        {"chunk_grid": _GRID | {"configuration": {"chunk_shape": [0, 3]}}},
        {"chunk_grid": _GRID | {"configuration": {"chunk_shape": [2, 3, 4]}}},
        {"chunk_key_encoding": "left out"},
        {"chunk_key_encoding": "v9"},
        {"chunk_key_encoding": None},
        {"chunk_key_encoding": []},
        {"chunk_key_encoding": {}},
        {"chunk_key_encoding": {"name": "default", "configuration": None}},
        {"chunk_key_encoding": {"name": "default", "configuration": "x"}},
        {"chunk_key_encoding": {"name": "default", "configuration": ["separator"]}},
        {"chunk_key_encoding": {"name": "default", "configuration": {"separator": "-"}}},
        {"chunk_key_encoding": {"name": "default", "configuration": {"separator": ["/"]}}},
        {"dimension_names": ["y"]},
        {"dimension_names": ["y", 3]},
        {"dimension_names": 5},
    ],
)
def test_documents_that_cannot_be_gridded(changes: dict[str, Any]) -> None:
    assert isinstance(parse_document(document()), ArrayMeta)
    assert parse_document(document(**changes)) is None


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"3",
        b'"zarr.json"',
        b"\xff\xfe",
        b"{}",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"zarr_format": NaN}',
        b"9" * 10_000,
    ],
)
def test_what_is_no_document(data: bytes) -> None:
    assert parse_document(data) is None


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=5,
)


@settings(max_examples=examples(300))
@given(
    st.dictionaries(
        st.sampled_from(
            ["shape", "chunk_grid", "chunk_key_encoding", "dimension_names", "zarr_format"]
        ),
        _json
        | st.fixed_dictionaries({"name": _json, "configuration": _json})
        | st.fixed_dictionaries(
            {"name": st.sampled_from(["default", "v2", "regular"]), "configuration": _json}
        ),
        max_size=3,
    )
)
def test_no_document_is_a_fault(changes: dict[str, Any]) -> None:
    meta = parse_document(document(**changes))
    assert meta is None or isinstance(meta, ArrayMeta)


_RESTS = st.one_of(
    st.lists(st.integers(0, 2**62), min_size=1, max_size=4).map(lambda c: ".".join(map(str, c))),
    st.lists(st.integers(0, 12), min_size=1, max_size=4).map(
        lambda c: "c." + ".".join(map(str, c))
    ),
    st.text(alphabet="c0129./+-\n\ud800 \u0665", max_size=8),
)


@given(
    st.lists(_RESTS, max_size=12),
    st.integers(0, 3),
    st.sampled_from(["default", "v2"]),
    st.sampled_from(["/", "."]),
    st.sampled_from([1, 9]),
)
def test_many_keys_are_decoded_as_one_is(
    rests: list[str],
    ndim: int,
    kind: Literal["default", "v2"],
    separator: Literal["/", "."],
    times: int,
) -> None:
    rests = [rest.replace(".", separator) for rest in rests] * times
    keys = ChunkKeys(kind, separator)
    coords, known = keys.decode_many(rests, ndim)
    assert (coords.shape, known.shape) == ((len(rests), ndim), (len(rests),))
    for rest, at, is_known in zip(rests, coords.tolist(), known.tolist(), strict=True):
        if is_known:
            assert keys.decode(rest, ndim) == tuple(at)
    plain = [keys.encode(tuple(range(i, i + ndim))) for i in range(5 * times)] if ndim else []
    assert keys.decode_many(plain, ndim)[1].all()


@pytest.mark.parametrize(
    "odd",
    [
        *("01.2", "1.02", "00.0", "1", "1.2.3", "1.", ".1", "", "+1.2", "1.a", "1 .2", "1\n.2"),
        *("\u0661.2", "9223372036854775808.0", "9999999999999999999.0"),
    ],
)
@pytest.mark.parametrize("times", [1, 9])
def test_keys_that_are_not_canonical_are_not_known_among_many(odd: str, times: int) -> None:
    for keys, lead in ((ChunkKeys("v2", "."), ""), (ChunkKeys("default", "."), "c.")):
        coords, known = keys.decode_many([f"{lead}7.8", lead + odd, f"{lead}0.10"] * times, 2)
        if "\n" not in odd:
            assert coords[[0, 2]].tolist() == [[7, 8], [0, 10]]
            assert known.tolist() == [True, False, True] * times
        assert not known[1]
    for odd_lead in ("d.", "cc.", "0."):
        assert not ChunkKeys("default", ".").decode_many([f"{odd_lead}7.8"] * times, 2)[1].any()
