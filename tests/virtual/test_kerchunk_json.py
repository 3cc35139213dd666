"""kerchunk references in JSON: templates, generated references, and many of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st

import zarr_manifests as zm
from zarr_manifests.errors import InvalidArgumentError, ManifestsError, UnsupportedFormatError
from zarr_manifests.virtual.budget import Budget
from zarr_manifests.virtual.containers import Containers
from zarr_manifests.virtual.kerchunk import read_kerchunk
from zarr_manifests.virtual.templates import Templates

ARRAY = {
    "zarr_format": 2,
    "shape": [20, 3],
    "chunks": [1, 1],
    "dtype": "<i2",
    "compressor": None,
    "filters": None,
    "fill_value": 0,
    "order": "C",
}


def generated(url: str) -> dict[str, Any]:
    """20 x 3 chunks in three files, as kerchunk's specification generates references."""
    return {
        "version": 1,
        "templates": {"u": url, "f": "{{c}}-0{{n}}.bin"},
        "gen": [
            {
                "key": "t/{{i}}.{{j}}",
                "url": "{{u}}/{{f(c='part', n=j)}}",
                "offset": "{{(i + 1) * 10}}",
                "length": "2",
                "dimensions": {"i": {"stop": 19}, "j": [0, 1, 2]},
            },
            {
                "key": "t/19.{{ j }}",
                "url": "{{ u }}/part-0{{ j // 2 * 2 }}.bin",
                "offset": "{{ 30 - 2 * (j % 2) }}",
                "length": "{{ 1 + 1 }}",
                "dimensions": {"j": {"start": 2, "stop": -1, "step": -1}},
            },
        ],
        "refs": {".zgroup": '{"zarr_format": 2}', "t/.zarray": json.dumps(ARRAY), "t/0.0": "x"},
    }


def test_generated_references_are_those_that_fsspec_generates(tmp_path: Path) -> None:
    for j in range(3):
        data = np.arange(200, dtype="<i2") + 1000 * j
        (tmp_path / f"part-0{j}.bin").write_bytes(data.tobytes())
    references = generated(tmp_path.as_uri())
    fs = fsspec.filesystem(
        "reference", fo=references, simple_templates=False, skip_instance_cache=True
    )
    found = read_kerchunk(generated(tmp_path.as_uri()), Containers())
    rows = zip(found.source, found.offset.tolist(), found.length.tolist(), strict=True)
    here = {k: [found.locations[s], o, n] for k, (s, o, n) in zip(found.keys, rows, strict=True)}
    expected = {key: ref for key, ref in fs.references.items() if isinstance(ref, list)}
    assert here == expected
    assert len(here) == 60
    repo = zm.create(tmp_path / "repo", virtual_containers={"here": tmp_path})
    zm.virtual.import_kerchunk(repo, generated(tmp_path.as_uri()))
    values = zarr.open_array(repo.readonly_session().store, path="t", mode="r")[:]
    assert values[:19].tolist() == [[5 + 5 * i + 1000 * j for j in range(3)] for i in range(19)]
    assert values[19].tolist() == [15, 14, 2015]


GOOD: dict[str, Any] = {
    "key": "t/{{i}}.0",
    "url": "/a",
    "offset": "{{i}}",
    "length": "1",
    "dimensions": {"i": {"stop": 3}},
}


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"key": 5}, InvalidArgumentError),
        ({"dimensions": [3]}, InvalidArgumentError),
        ({"dimensions": {"i": {"stop": 2**40}}}, InvalidArgumentError),
        ({"dimensions": {n: {"stop": 1000} for n in "ijk"}}, InvalidArgumentError),
        ({"dimensions": {"i": {"stop": 3, "step": 0}}}, InvalidArgumentError),
        ({"dimensions": {"i": {"stop": "3"}}}, InvalidArgumentError),
        ({"dimensions": {"i": {"start": 3}}}, InvalidArgumentError),
        ({"dimensions": {"i": [1.5]}}, InvalidArgumentError),
        ({"dimensions": {"j": [1]}}, InvalidArgumentError),
        ({"offset": None}, InvalidArgumentError),
        ({"offset": "{{i}}.5"}, InvalidArgumentError),
        ({"offset": "{{i - 1}}"}, InvalidArgumentError),
        ({"offset": "9" * 30}, InvalidArgumentError),
        ({"offset": "{{ 'a' * 10**10 }}"}, UnsupportedFormatError),
        ({"url": "{% for i in range(9) %}{% endfor %}"}, UnsupportedFormatError),
    ],
)
def test_generators_that_are_refused(change: dict[str, Any], error: type[ManifestsError]) -> None:
    refs = {"t/.zarray": ARRAY}
    assert len(read_kerchunk({"refs": refs, "gen": [GOOD]}, Containers()).keys) == 3
    with pytest.raises(error):
        read_kerchunk({"refs": refs, "gen": [GOOD | change]}, Containers())
    without = {name: GOOD[name] for name in GOOD if name != "length"}
    with pytest.raises(InvalidArgumentError, match="both or none"):
        read_kerchunk({"refs": refs, "gen": [without]}, Containers())


def test_what_is_generated_is_bounded_together() -> None:
    refs: dict[str, Any] = {"refs": {}, "gen": [GOOD, GOOD]}
    assert len(read_kerchunk(refs, Containers(), max_references=6).keys) == 3
    refs["gen"] += [GOOD]
    with pytest.raises(InvalidArgumentError, match=r"more than 6.*max_references="):
        read_kerchunk(refs, Containers(), max_references=6)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain {", "plain {"),
        ("{{i}}{{ i }}", "77"),
        ("{{ (i + 1) * 2 - -3 }}", "19"),
        ("{{ i // 2 }}/{{ i % 4 }}", "3/3"),
        ("{{ '%03d' % i }}.{{ '%d' % (i * 100) }}", "007.700"),
        ("{{ 'text' }}", "text"),
        ("{{ f(c=i, d='x') }}", "<7x>"),
        ("{{ f(c=f(c=1, d=2), d=u) }}", "<<12>place>"),
    ],
)
def test_templates(text: str, expected: str) -> None:
    assert Templates({"u": "place", "f": "<{{c}}{{d}}>"}).render(text, {"i": 7}) == expected


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("{{ i ** 2 }}", UnsupportedFormatError),
        ("{{ i / 2 }}", UnsupportedFormatError),
        ("{{ 1.5 }}", UnsupportedFormatError),
        ("{{ True }}", UnsupportedFormatError),
        ("{{ i.__class__ }}", UnsupportedFormatError),
        ("{{ u[0] }}", UnsupportedFormatError),
        ("{{ range(3) }}", UnsupportedFormatError),
        ("{{ f('x') }}", UnsupportedFormatError),
        ("{{ f(**u) }}", UnsupportedFormatError),
        ("{{ i | string }}", UnsupportedFormatError),
        ("{{ '%999999999d' % i }}", InvalidArgumentError),
        ("{{ '%s' % i }}", InvalidArgumentError),
        ("{{ }}", UnsupportedFormatError),
        ("{{ i", UnsupportedFormatError),
        ("{# i #}", UnsupportedFormatError),
        ("{{ [i for i in i] }}", UnsupportedFormatError),
        ("{{ " + "(" * 400 + "1" + ")" * 400 + " }}", UnsupportedFormatError),
        ("{{ " + "-" * 300 + "1 }}", UnsupportedFormatError),
        ("{{ 1" + " + 1" * 300 + " }}", UnsupportedFormatError),
        ("{{ none }}", InvalidArgumentError),
        ("{{ u + 1 }}", InvalidArgumentError),
        ("{{ 'a' * 1000000000 }}", InvalidArgumentError),
        ("{{ i // 0 }}", InvalidArgumentError),
        ("{{ " + " * ".join(["4611686018427387904"] * 8) + " }}", InvalidArgumentError),
        ("{{ " + "g(c=" * 24 + "'ab'" + ")" * 24 + " }}", InvalidArgumentError),
        ("{{ g }}", InvalidArgumentError),
    ],
)
def test_templates_that_are_refused(text: str, error: type[ManifestsError]) -> None:
    texts = {"u": "place", "f": "<{{c}}>", "g": "{{c}}{{c}}"}
    templates = Templates(texts, Budget(1 << 20))
    with pytest.raises(error):
        templates.render(text, {"i": 7})


@given(st.text(alphabet="{}%i+-*/'() 10fuc=,.d", max_size=40))
def test_templates_render_or_give_errors_of_the_project(text: str) -> None:
    templates = Templates({"u": "place", "f": "<{{c}}>"})
    for each in (text, "{{" + text + "}}"):
        try:
            assert len(templates.render(each, {"i": 7})) < 10_000
        except ManifestsError:
            continue


@pytest.mark.parametrize(
    ("references", "match"),
    [
        ({"a": ["wind.nc", 0, 1]}, "'a' refers to 'wind.nc', a relative path.*absolute"),
        ({"a": ["https:me:secret@h", 0, 1]}, "^https: lacks its two slashes"),
        ({"a": ["file:///\ud800", 0, 1]}, "Unicode"),
        ({"\ud800": ["file:///a", 0, 1]}, "Unicode"),
        ({"\ud800": "a"}, "Unicode"),
        ({"a": "\ud800"}, "malformed"),
        ({"a": ["file:///a", 2**64, 1]}, "malformed"),
        ({"a": ["file:///a", 0, True]}, "malformed"),
        ({"a": []}, "malformed"),
        ({"a": [["file:///a"], 0, 1]}, "malformed"),
        ({"a": None}, "malformed"),
        ({"version": 1, "templates": [], "gen": {"a": 1}, "refs": {}}, "'gen' a list"),
        ({"version": 1, "templates": {"u": 5}, "refs": {}}, "templates"),
    ],
)
def test_references_that_are_refused(references: dict[str, Any], match: str) -> None:
    with pytest.raises(InvalidArgumentError, match=match):
        read_kerchunk(references, Containers())


def test_versions_that_are_not_known() -> None:
    with pytest.raises(UnsupportedFormatError, match="version"):
        read_kerchunk({"version": 2, "refs": {}}, Containers())


@pytest.mark.parametrize("separator", [".", "/"])
def test_keys_take_little_work_each(tmp_path: Path, separator: str) -> None:
    """As the number of function calls for each of many references."""
    n = 30_000
    fields = ARRAY | {"shape": [n // 10, 10], "dimension_separator": separator}
    refs: dict[str, Any] = {".zgroup": '{"zarr_format": 2}', "in/t/.zarray": fields}
    for i in range(n):
        refs[f"in/t/{i // 10}{separator}{i % 10}"] = [f"file:///data/{i % 100}.nc", i * 10, 10]
    repo = zm.create(tmp_path / "repo")
    calls = 0

    def count(_frame: object, event: str, _arg: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        zm.virtual.import_kerchunk(repo, refs)
    finally:
        sys.setprofile(None)
    # One a reference looks its file up.
    assert calls < 3 * n
    found = repo.readonly_session().store.get_virtual_refs("in/t")
    assert found.offset.tolist() == [i * 10 for i in range(n)]
    assert found.locations[int(found.source[12_345])] == "file:///data/45.nc"
