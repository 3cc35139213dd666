"""The store: Zarr's own suites, and its own promises beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test
from zarr.core.buffer import cpu
from zarr.core.sync import sync
from zarr.testing.stateful import ZarrStoreStateMachine
from zarr.testing.strategies import arrays

import zarr_manifests as zm
from effort import examples
from stored import contents, put
from zarr_manifests.errors import ReadOnlyError
from zarr_manifests.storage import Storage
from zarr_manifests.storage.local import LocalStorage
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import ManifestStore, contents_of

_MACHINES = settings(
    deadline=None,
    max_examples=examples(20),
    stateful_step_count=20,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),
)
# Zarr's suite pickles stores that were opened for writing.
pytestmark = pytest.mark.filterwarnings("ignore:a writable store was pickled")

# Zarr's strategies draw every data type Zarr has.
_any_data_type = pytest.mark.filterwarnings(
    "ignore::zarr.errors.UnstableSpecificationWarning",
    "ignore::zarr.errors.ZarrUserWarning",
    "ignore:.*:UserWarning:numcodecs",
)


def _store(storage: Storage) -> ManifestStore:
    return zm.create(storage).writable_session("main").store


@pytest.mark.hypothesis
@pytest.mark.parametrize("place", ["memory", "local"])
def test_zarr_store_machine(tmp_path: Path, place: str) -> None:
    store = _store(MemoryStorage() if place == "memory" else LocalStorage(tmp_path / "r"))
    run_state_machine_as_test(lambda: ZarrStoreStateMachine(store), settings=_MACHINES)


@_any_data_type
@settings(deadline=None, max_examples=examples(60), suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_arrays_of_format_2_that_zarr_draws(data: st.DataObject) -> None:
    """The keys and values are those of another store, and none is opaque."""
    kept: dict[str, Any] = {}
    model = zarr.storage.MemoryStore(kept)
    array: Any = data.draw(
        arrays(
            stores=st.just(model),
            paths=st.just("g"),
            array_names=st.just("a"),
            zarr_formats=st.just(2),
            open_mode="a",
        )
    )
    due = {key: value.to_bytes() for key, value in kept.items()}
    repository = zm.create(MemoryStorage(), {"compaction": {"max-delta-count": 1}})
    session = repository.writable_session("main")
    for key in data.draw(st.permutations(sorted(due))):
        put(session, key, due[key])
    session.commit("in any order")
    store = repository.readonly_session("main").store
    assert contents(store) == due
    assert not any(path.startswith("/") for path in contents_of(store).nodes())
    found = zarr.open_array(store, path="g/a", mode="r", zarr_format=2)
    assert found.metadata == array.metadata
    np.testing.assert_array_equal(found[...], array[...])


def test_readonly_session_refuses_writes_of_every_kind() -> None:
    store = zm.create(MemoryStorage()).readonly_session("main").store
    x = cpu.Buffer.from_bytes(b"x")
    assert store.read_only
    assert not store.supports_writes
    for write in (
        lambda: store.set_sync("a", x),
        lambda: store.delete_sync("a"),
        lambda: sync(store.set("a", x)),
        lambda: sync(store.set_if_not_exists("a", x)),
        lambda: sync(store.delete("a")),
        lambda: sync(store.delete_dir("a")),
        lambda: store.with_read_only(False),
    ):
        with pytest.raises(ReadOnlyError):
            write()


def test_only_buffers_are_taken() -> None:
    store = _store(MemoryStorage())
    with pytest.raises(TypeError, match="Buffer"):
        store.set_sync("a", b"bytes")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Buffer"):
        sync(store.set("a", b"bytes"))  # type: ignore[arg-type]
