"""Zarr keys and documents."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from effort import examples
from zarr_manifests.keys import ArrayMeta, ChunkKeys, document_path, parse_document


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


encodings = st.sampled_from(
    [ChunkKeys(kind, sep) for kind in ("default", "v2") for sep in ("/", ".")]  # type: ignore[arg-type]
)


@given(encodings, st.lists(st.integers(0, 2**62), max_size=4).map(tuple))
def test_chunk_keys_round_trip(keys: ChunkKeys, coords: tuple[int, ...]) -> None:
    assert keys.decode(keys.encode(coords), len(coords)) == coords


@settings(max_examples=examples(1_000))
@given(encodings, st.text(st.sampled_from("c/.0123+- \n٣"), max_size=8), st.integers(0, 3))
def test_only_the_canonical_key_is_a_chunk(keys: ChunkKeys, rest: str, ndim: int) -> None:
    coords = keys.decode(rest, ndim)
    if coords is not None:
        assert keys.encode(coords) == rest
        assert len(coords) == ndim


def test_a_number_is_written_in_one_way() -> None:
    assert ChunkKeys("default", "/").decode("c/01", 1) is None


def test_document_paths() -> None:
    assert document_path("zarr.json") == ""
    assert document_path("a/b/zarr.json") == "a/b"
    assert document_path("a/zarr.json/") is None
    assert document_path("a/xzarr.json") is None
    assert [document_path(f"a/{name}") for name in (".zarray", ".zgroup", ".zattrs")] == ["a"] * 3
    assert document_path("a/.zmetadata") is None
    assert document_path("/zarr.json") is None


# --- documents -------------------------------------------------------------------------------


def test_encodings_and_their_defaults() -> None:
    for encoding, expected in (
        ("v2", ChunkKeys("v2", ".")),
        ({"name": "default"}, ChunkKeys("default", "/")),
        ({"name": "v2", "configuration": {"separator": "/"}}, ChunkKeys("v2", "/")),
    ):
        meta = parse_document(document(chunk_key_encoding=encoding))
        assert isinstance(meta, ArrayMeta)
        assert meta.chunk_keys == expected


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
        | st.fixed_dictionaries(
            {"name": _json | st.sampled_from(["default", "v2", "regular"]), "configuration": _json}
        ),
        max_size=3,
    )
)
def test_no_document_is_a_fault(changes: dict[str, Any]) -> None:
    meta = parse_document(document(**changes))
    assert meta is None or isinstance(meta, ArrayMeta)


many = st.lists(st.integers(0, 10**19), min_size=1, max_size=4).map(lambda c: ".".join(map(str, c)))
rests = many | many.map("c.{}".format) | st.text("c0129./+-\n\ud800 \u0665", max_size=8)


@given(encodings, st.lists(rests, min_size=1, max_size=12), st.integers(0, 3))
def test_many_keys_are_decoded_as_one_is(keys: ChunkKeys, some: list[str], ndim: int) -> None:
    some = [rest.replace(".", keys.separator) for rest in some]
    alike = [rest for rest in some if keys.decode(rest, ndim) is not None]
    for rests in (some, alike or some):
        each, found = [keys.decode(rest, ndim) for rest in rests], keys.decode_all(rests, ndim)
        if ndim and None not in each:
            assert found is not None
            assert found.tolist() == [[min(n, 2**63 - 1) for n in at or ()] for at in each]
        else:
            assert found is None
    plain = [keys.encode(tuple(range(i, i + ndim))) for i in range(5)]
    assert (keys.decode_all(plain, ndim) is None) == (ndim == 0)
