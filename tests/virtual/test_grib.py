"""GRIB messages, taken in by kerchunk's references."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import zarr
from kerchunk.grib2 import scan_grib

import zarr_manifests as zm
from raw_files import grib_values, save_grib
from zarr_manifests.virtual import kerchunk


def test_messages_are_taken_in_by_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = save_grib(tmp_path / "day.grib", 1, (4, 6), ("2t", "2d"))
    messages = scan_grib(str(place))
    repo = zm.create(tmp_path / "repo", virtual_containers={"raw": tmp_path})
    for at, name in enumerate(("t2m", "d2m")):
        refs = {key: ref for key, ref in messages[at]["refs"].items() if key.startswith(name)}
        refs |= {".zgroup": '{"zarr_format": 2}'}
        refs[f"{name}/0.0"] = refs.pop(f"{name}/0.0", None) or refs.pop(f"{name}/0")
        whole = {"version": 1, "templates": {"u": str(place)}, "refs": refs}
        zm.virtual.import_kerchunk(repo, whole, f"message-{at}")
        path = f"message-{at}/{name}"
        store = repo.readonly_session().store
        assert len(store.get_virtual_refs(path)) == 1
        found = zarr.open_array(store, path=path, mode="r", zarr_format=2)[...]
        np.testing.assert_allclose(found.reshape(4, 6), grib_values(1, (4, 6)) + at)
    monkeypatch.setattr(kerchunk, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"'d2m' are GRIB messages.*zarr-manifests\[grib\]"):
        zm.virtual.import_kerchunk(repo, whole, "again")
