"""Kerchunk references that continue what is there, day after day."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from fsspec.implementations.reference import LazyReferenceMapper

import zarr_manifests as zm
from zarr_manifests.errors import InvalidArgumentError


@pytest.fixture
def repo(tmp_path: Path) -> zm.Repository:
    return zm.create(tmp_path / "repo", virtual_containers={"here": tmp_path})


def day_references(folder: Path, number: int, **changes: Any) -> dict[str, Any]:
    """References to a day of weather: two steps in a file, with times inline."""
    values = np.arange(12, dtype="i2").reshape(2, 6) + 100 * number
    (folder / f"day-{number}.bin").write_bytes(values.tobytes())
    time = np.arange(2, dtype="i8") + 2 * number

    def zarray(shape: list[int], chunks: list[int], dtype: str) -> dict[str, Any]:
        return {
            "zarr_format": 2,
            "shape": shape,
            "chunks": chunks,
            "dtype": dtype,
            "order": "C",
            "compressor": None,
            "filters": None,
            "fill_value": None,
        }

    t: dict[str, Any] = {"_ARRAY_DIMENSIONS": ["time", "x"], "scale_factor": 0.1, "day": number}
    at, x = str(folder / f"day-{number}.bin"), base64.b64encode(np.arange(6).tobytes()).decode()
    refs = {
        ".zgroup": {"zarr_format": 2},
        "t/.zarray": zarray([2, 6], [1, 3], "<i2"),
        "t/.zattrs": t,
        **{f"t/{i}.{j}": [at, 12 * i + 6 * j, 6] for i in range(2) for j in range(2)},
        "time/.zarray": zarray([2], [2], "<i8"),
        "time/.zattrs": {"_ARRAY_DIMENSIONS": ["time"]},
        "time/0": f"base64:{base64.b64encode(time.tobytes()).decode()}",
        "x/.zarray": zarray([6], [6], "<i8"),
        "x/.zattrs": {"_ARRAY_DIMENSIONS": ["x"]},
        "x/0": f"base64:{x}",
    }
    return {**refs, **changes}


def weather_of(repo: zm.Repository, path: str = "") -> Any:
    store = repo.readonly_session().store
    return zarr.open_group(store, path=path, mode="r", zarr_format=2)


def test_references_are_appended_day_by_day(repo: zm.Repository, tmp_path: Path) -> None:
    for number in range(3):
        references = day_references(tmp_path, number)
        zm.virtual.import_kerchunk(
            repo, references, "w", append_dim="time", message=f"day {number}"
        )
    assert [info.message for info in repo.ancestry()][:3] == ["day 2", "day 1", "day 0"]
    found = weather_of(repo, "w")
    assert found["time"][:].tolist() == list(range(6))
    assert found["x"][:].tolist() == list(range(6))
    days = [np.arange(12).reshape(2, 6) + 100 * number for number in range(3)]
    expected = np.concatenate(days)
    np.testing.assert_array_equal(found["t"][:], expected)
    assert found["t"].attrs["day"] == 0
    refs = repo.readonly_session().store.get_virtual_refs("w/t")
    assert len(refs) == 12
    assert [Path(url).name for url in refs.locations] == [f"day-{n}.bin" for n in range(3)]


def test_parquet_references_are_appended(repo: zm.Repository, tmp_path: Path) -> None:
    days = [day_references(tmp_path, number) for number in range(2)]
    for number, references in enumerate(days):
        folder = tmp_path / f"refs-{number}.parquet"
        made = LazyReferenceMapper.create(str(folder), record_size=3, engine="pyarrow")
        for key, value in references.items():
            made[key] = json.dumps(value).encode() if isinstance(value, dict) else value
        made.flush()
        zm.virtual.import_kerchunk(repo, folder, append_dim="time")
    one = weather_of(repo)["t"][:]
    for references in days:
        zm.virtual.import_kerchunk(repo, references, "again", append_dim="time")
    np.testing.assert_array_equal(weather_of(repo, "again")["t"][:], one)
    assert one.shape == (4, 6)


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("t/.zarray", {"dtype": "<i4"}, "/t has another dtype"),
        ("t/.zarray", {"chunks": [2, 3]}, "/t has another chunks"),
        ("t/.zarray", {"compressor": {"id": "zlib", "level": 1}}, "/t has another compressor"),
        ("t/.zarray", {"shape": [2, 5]}, "differ in more than 'time'"),
        ("t/.zattrs", {"scale_factor": 1.0}, "/t has another scale_factor"),
        ("t/.zattrs", {"_ARRAY_DIMENSIONS": ["x", "time"]}, "/t has another _ARRAY_DIMENSIONS"),
        ("x/.zarray", {"shape": [7]}, "/x has the shape"),
    ],
)
def test_what_cannot_be_appended_is_named(
    repo: zm.Repository, tmp_path: Path, name: str, change: dict[str, Any], said: str
) -> None:
    zm.virtual.import_kerchunk(repo, day_references(tmp_path, 0), append_dim="time")
    before = repo.list_branches()
    references = day_references(tmp_path, 1)
    references[name] = references[name] | change
    with pytest.raises(InvalidArgumentError, match=said):
        zm.virtual.import_kerchunk(repo, references, append_dim="time")
    assert repo.list_branches() == before


def test_another_grid_is_not_appended(repo: zm.Repository, tmp_path: Path) -> None:
    zm.virtual.import_kerchunk(repo, day_references(tmp_path, 0), append_dim="time")
    moved = base64.b64encode(np.arange(1, 7).tobytes()).decode()
    with pytest.raises(InvalidArgumentError, match="the chunk x/0 has other bytes than here"):
        zm.virtual.import_kerchunk(
            repo, day_references(tmp_path, 1, **{"x/0": f"base64:{moved}"}), append_dim="time"
        )
    zm.virtual.import_kerchunk(repo, day_references(tmp_path, 1), append_dim="time")


def test_appending_needs_whole_chunks_and_known_arrays(repo: zm.Repository, tmp_path: Path) -> None:
    references = day_references(tmp_path, 0)
    odd = references | {"time/.zarray": references["time/.zarray"] | {"chunks": [4]}}
    odd["time/0"] = f"base64:{base64.b64encode(np.arange(4).tobytes()).decode()}"
    zm.virtual.import_kerchunk(repo, odd, append_dim="time")
    with pytest.raises(InvalidArgumentError, match="/time ends within a chunk"):
        zm.virtual.import_kerchunk(repo, odd, append_dim="time")
    zm.virtual.import_kerchunk(repo, references, mode="w")
    more = {"u" + key[1:]: value for key, value in references.items() if key[:2] == "t/"}
    with pytest.raises(InvalidArgumentError, match="no array /u to append to"):
        zm.virtual.import_kerchunk(repo, references | more, append_dim="time")
    with pytest.raises(InvalidArgumentError, match="has the dimension 'level'"):
        zm.virtual.import_kerchunk(repo, references, append_dim="level")
    with pytest.raises(InvalidArgumentError, match="no chunk of"):
        zm.virtual.import_kerchunk(repo, references | {"t/a": "data"}, append_dim="time")
    broken = references | {"t/.zattrs": "{", "t/.zarray": {"zarr_format": 2}}
    with pytest.raises(InvalidArgumentError, match="no chunk of"):
        zm.virtual.import_kerchunk(repo, broken, append_dim="time")
    with pytest.raises(InvalidArgumentError, match="exclude each other"):
        zm.virtual.import_kerchunk(repo, references, mode="w", append_dim="time")
