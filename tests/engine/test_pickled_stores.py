"""A pickled store does nothing until it is used, and whatever it changes is noticed."""

import copy
import pickle
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import xarray as xr
import zarr
from dask.base import tokenize

import zarr_manifests as zm
from zarr_manifests import Session
from zarr_manifests.errors import MissingChunkError, PickledStoreWarning
from zarr_manifests.store import ManifestStore

pytestmark = pytest.mark.filterwarnings("ignore:a writable store was pickled")


@pytest.fixture
def strict() -> Iterator[None]:
    """The warning is an error; the mark of the module goes before the mark of a test."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", PickledStoreWarning)
        yield


def copied(store: ManifestStore) -> ManifestStore:
    return pickle.loads(pickle.dumps(store))


def begun(path: Path) -> Session:
    repo = zm.create(path, {"inline-chunk-bytes": 0})
    with repo.transaction(message="sevens") as store:
        zarr.create_array(store, name="a", shape=(6,), chunks=(2,), dtype="i4")[:] = 7
        zarr.create_group(store, path="old")
    session = repo.writable_session()
    zarr.create_group(session.store, path="g")
    return session


def test_what_a_merged_copy_changed_is_committed(tmp_path: Path) -> None:
    session = begun(tmp_path)
    one = copied(session.store)
    array = zarr.open_array(one, path="a", mode="r+")
    array[:2] = 8
    array[2:4] = 0  # the fill value: the chunk goes
    array.attrs["units"] = "K"
    del zarr.open_group(one, mode="r+")["old"]
    session.merge(copied(one))
    session.commit("with the copy's work")
    group = zarr.open_group(zm.open(tmp_path).readonly_session().store, mode="r")
    assert sorted(group) == ["a", "g"]
    assert group["a"][:].tolist() == [8, 8, 0, 0, 7, 7]
    assert group["a"].attrs["units"] == "K"


@pytest.mark.usefixtures("strict")
def test_pickling_a_writable_store_warns_once_and_says_what_to_do(tmp_path: Path) -> None:
    session = begun(tmp_path)
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
    session = begun(tmp_path)
    read = zm.open(tmp_path).readonly_session()
    for store in (read.store, session.store.with_read_only(True), session.fork().store):
        assert copied(store) == store
    for fork in (session.fork().store, copied(session.fork().store)):
        assert zarr.open_array(fork, path="a")[:].tolist() == [7] * 6  # which opens it
        copied(fork)
    pickle.loads(pickle.dumps(session.fork()))
    tokenize(session.store, zarr.open_array(session.store, path="a"))
    for of in (copy.copy, copy.deepcopy):
        assert of(session.store) == session.store
    lazy = xr.open_zarr(session.store, group="g", consolidated=False, chunks={})
    pickle.dumps(lazy)
    lazy.copy(deep=True)


def test_unpickling_reads_nothing(tmp_path: Path) -> None:
    begun(tmp_path)
    store = zm.open(tmp_path).readonly_session().store
    same = copied(store)
    assert (same, same.supports_writes) == (store, False)
    pickled = pickle.dumps(same)
    shutil.move(tmp_path, tmp_path.with_name("moved"))
    unreachable = pickle.loads(pickled)
    with pytest.raises(MissingChunkError):
        unreachable.get_sync("a/c/0")
