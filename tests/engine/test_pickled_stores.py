"""A pickled store does nothing until it is used, and whatever it changes is noticed."""

import copy
import pickle
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
import zarr
from dask.base import tokenize

import zarr_manifests as zm
from zarr_manifests import Session
from zarr_manifests.error_cases import PickledStoreWarning, UnmergedForksError
from zarr_manifests.errors import MissingChunkError
from zarr_manifests.store import ManifestStore

pytestmark = pytest.mark.filterwarnings("ignore:a writable store was pickled")


@pytest.fixture
def strict() -> Iterator[None]:
    """The warning is an error; the mark of the module goes before the mark of a test."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", PickledStoreWarning)
        yield


def _copy(store: ManifestStore) -> ManifestStore:
    copied: ManifestStore = pickle.loads(pickle.dumps(store))
    return copied


def _session(path: Path) -> Session:
    repo = zm.create(path)
    with repo.transaction(message="sevens") as store:
        zarr.create_array(store, name="a", shape=(4,), chunks=(2,), dtype="i4")[:] = 7
    session = repo.writable_session()
    zarr.create_group(session.store, path="g")
    return session


def _write(store: ManifestStore) -> None:
    zarr.open_array(store, path="a", mode="r+")[:2] = 8


def _unset(store: ManifestStore) -> None:
    zarr.open_array(store, path="a", mode="r+")[:2] = 0  # the fill value: the chunk goes


def _describe(store: ManifestStore) -> None:
    zarr.open_array(store, path="a", mode="r+").attrs["units"] = "K"


def _remove(store: ManifestStore) -> None:
    del zarr.open_group(store, mode="r+")["a"]


@pytest.mark.parametrize("change", [_write, _unset, _describe, _remove])
def test_what_an_unmerged_copy_changed_is_not_left_out_silently(tmp_path: Path, change) -> None:
    session = _session(tmp_path)
    change(_copy(session.store))
    with pytest.raises(UnmergedForksError, match="1 copies"):
        session.commit("without the copy's work")
    session.commit("on purpose", discard_unmerged=True)


@pytest.mark.parametrize("change", [_write, _unset, _describe, _remove])
def test_what_a_merged_copy_changed_is_committed(tmp_path: Path, change) -> None:
    session = _session(tmp_path)
    expected = zm.open(tmp_path).writable_session()
    change(expected.store)
    one = _copy(session.store)
    change(one)
    session.merge(_copy(one))
    session.commit("with the copy's work")
    group = zarr.open_group(session.store, mode="r")
    other = zarr.open_group(expected.store, mode="r")
    assert sorted(group) == sorted([*other, "g"])
    if "a" in other:
        np.testing.assert_array_equal(group["a"][:], other["a"][:])
        assert dict(group["a"].attrs) == dict(other["a"].attrs)


@pytest.mark.usefixtures("strict")
def test_pickling_a_writable_store_warns_once_and_says_what_to_do(tmp_path: Path) -> None:
    session = _session(tmp_path)
    array = zarr.open_array(session.store, path="a", mode="r+")
    with pytest.warns(PickledStoreWarning, match=r"zarr_manifests\.write.*session\.fork") as caught:
        pickle.dumps(array)
    assert [Path(one.filename) for one in caught] == [Path(__file__)]
    pickle.dumps(array)
    session.commit("and go on")
    zarr.create_group(session.store, path="h")
    with pytest.warns(PickledStoreWarning):
        pickle.dumps(session.store)


@pytest.mark.usefixtures("strict")
def test_what_leaves_nothing_out_does_not_warn(tmp_path: Path) -> None:
    session = _session(tmp_path)
    read = zm.open(tmp_path).readonly_session()
    for store in (read.store, session.store.with_read_only(True), session.fork().store):
        assert _copy(store) == store
    _copy(_copy(session.fork().store))
    for copied in (session.fork().store, _copy(session.fork().store)):
        assert zarr.open_array(copied, path="a")[:].tolist() == [7] * 4  # which opens it
        _copy(copied)
    pickle.loads(pickle.dumps(session.fork()))
    tokenize(session.store, zarr.open_array(session.store, path="a"))
    for of in (copy.copy, copy.deepcopy):
        assert of(session.store) == session.store
    lazy = xr.open_zarr(session.store, group="g", consolidated=False, chunks={})
    pickle.dumps(lazy)
    lazy.copy(deep=True)


def test_a_copy_that_only_reads_keeps_nothing_from_being_committed(tmp_path: Path) -> None:
    session = _session(tmp_path)
    assert zarr.open_array(_copy(session.store), path="a", mode="r")[:].tolist() == [7] * 4
    session.commit("nothing is left out")


def test_unpickling_reads_nothing(tmp_path: Path) -> None:
    repo = zm.create(tmp_path, {"inline-chunk-bytes": 0})
    with repo.transaction(message="sevens") as store:
        zarr.create_array(store, name="a", shape=(4,), chunks=(2,), dtype="i4")[:] = 7
    store = repo.readonly_session().store
    copied = _copy(store)
    assert (copied, copied.supports_writes) == (store, False)
    pickled = pickle.dumps(copied)
    shutil.move(tmp_path, tmp_path.with_name("moved"))
    unreachable = pickle.loads(pickled)
    with pytest.raises(MissingChunkError):
        unreachable.get_sync("a/c/0")
