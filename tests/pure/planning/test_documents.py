"""What two versions of a document differ in, and three-way merges."""

from __future__ import annotations

import json
from typing import Any

import pytest

from zarr_manifests.format.manifest import Node, NodeKind
from zarr_manifests.planning.components import DocumentChange, compare_documents, merge_documents

FIELDS = {
    "zarr_format": 3,
    "node_type": "array",
    "shape": [4, 4],
    "data_type": "int16",
    "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [2, 2]}},
    "chunk_key_encoding": {"name": "default"},
    "fill_value": 0,
    "codecs": [{"name": "bytes"}],
    "attributes": {"a": 1, "b": {"deep": [1.5, None]}},
}


def array(document: bytes | None = None, **changed: Any) -> Node:
    data = json.dumps({**FIELDS, **changed}).encode() if document is None else document
    return Node("a", b"a" * 12, NodeKind.ARRAY, {"zarr.json": data})


BASE = array()
# What xarray decodes values by.
DECODING = (
    *("scale_factor", "add_offset", "_FillValue", "missing_value", "units", "calendar"),
    *("_Unsigned", "_Encoding", "dtype", "_ARRAY_DIMENSIONS"),
)


def merged(mine: Node, theirs: Node, **options: Any) -> dict[str, Any]:
    found = json.loads(merge_documents(BASE, mine, theirs, **options)["zarr.json"])
    assert isinstance(found, dict)
    return found


def test_what_differs() -> None:
    assert compare_documents(BASE, BASE) == DocumentChange()
    spaced = json.dumps(FIELDS, indent=7, sort_keys=True).encode()
    assert compare_documents(BASE, array(spaced)) == DocumentChange()
    assert compare_documents(BASE, array(shape=[9, 4])).grown == {0}
    both = compare_documents(BASE, array(shape=[9, 3]))
    assert (both.grown, both.shrunk) == ({0}, True)
    assert compare_documents(BASE, array(attributes={"a": True, "c": 2})).attributes == {
        "a": "true",
        "b": None,
        "c": "2",
    }


@pytest.mark.parametrize(
    "changed",
    [
        {"data_type": "int8"},
        {"fill_value": 0.0},
        {"codecs": []},
        {"dimension_names": ["x", "y"]},
        {"chunk_key_encoding": {"name": "v2"}},
        {"something_new": 1},
        {"shape": [4], "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [2]}}},
        {"attributes": ["no", "object"]},
        *({"attributes": {**FIELDS["attributes"], key: 1}} for key in DECODING),  # type: ignore[dict-item]
    ],
)
def test_what_is_structure(changed: dict[str, Any]) -> None:
    assert compare_documents(BASE, array(**changed)).structure
    assert compare_documents(array(**changed), BASE).structure
    assert not compare_documents(array(**changed), array(**changed)).structure


def test_attributes_of_groups_are_never_structure() -> None:
    def group(**attributes: Any) -> Node:
        fields = {"zarr_format": 3, "node_type": "group", "attributes": attributes}
        document = json.dumps(fields).encode()
        return Node("g", b"g" * 12, NodeKind.GROUP, {"zarr.json": document})

    change = compare_documents(group(), group(units="K"))
    assert (change.structure, change.attributes) == (False, {"units": '"K"'})


def test_a_document_that_one_side_changed_stays_as_it_was_written() -> None:
    mine = array(json.dumps({**FIELDS, "shape": [8, 4]}, indent=5).encode())
    assert merge_documents(BASE, mine, BASE) == mine.documents
    assert merge_documents(BASE, BASE, mine) == mine.documents
    assert merge_documents(BASE, mine, mine) == mine.documents


def test_both_sides_merge_to_the_same_bytes() -> None:
    one = array(shape=[8, 4], attributes={"b": 2, "z": 1, "m": float("nan")})
    two = array(shape=[6, 4], attributes={"a": 1, "b": FIELDS["attributes"]["b"], "k": 3})  # type: ignore[index]
    found = merge_documents(BASE, one, two)
    assert found == merge_documents(BASE, two, one)
    fields = json.loads(found["zarr.json"])
    assert fields["shape"] == [8, 4]
    assert list(fields["attributes"]) == ["b", "k", "m", "z"]
    assert fields["attributes"]["b"] == 2
    assert {k: v for k, v in fields.items() if k not in ("shape", "attributes")} == {
        k: v for k, v in FIELDS.items() if k not in ("shape", "attributes")
    }


def test_a_shrink_counts_beside_no_change_of_shape() -> None:
    one, two = array(shape=[2, 4]), array(attributes={})
    assert merged(one, two)["shape"] == merged(two, one)["shape"] == [2, 4]
    assert merged(one, two)["attributes"] == {}


def test_whose_value_counts_is_asked_by_key() -> None:
    one = array(attributes={"a": "mine", "b": "mine", "n": 1})
    two = array(attributes={"a": "theirs", "b": "theirs"})
    assert merged(one, two)["attributes"] == {"a": "theirs", "b": "theirs", "n": 1}
    found = merged(one, two, winning={"b"})["attributes"]
    assert found == {"a": "theirs", "b": "mine", "n": 1}
    gone = array(attributes={"b": FIELDS["attributes"]["b"]})  # type: ignore[index]
    assert "a" not in merged(gone, two, winning={"a", "b", "c"})["attributes"]
