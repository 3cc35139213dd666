"""Any sequence of store operations, commits and folds does what a dict does.

Whether changes are spilled or not, and bases are in pages or not.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import ExitStack, nullcontext
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import zarr_manifests as zm
from effort import examples
from inside import small_node_pages
from stored import array_document, get, put
from zarr_manifests.keys import (
    DOCUMENTS,
    V3_DOCUMENT,
    ArrayMeta,
    join,
    node_documents,
    parse_documents,
)
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.store import ManifestStore


def default_array(
    shape: tuple[int, ...], kind: str = "default", separator: str = "/", note: int = 0
) -> bytes:
    encoding = {"name": kind, "configuration": {"separator": separator}}
    return array_document(shape, chunk_key_encoding=encoding, attributes={"note": note})


def group_document(note: int = 0) -> bytes:
    document = {"zarr_format": 3, "node_type": "group", "attributes": {"note": note}}
    return json.dumps(document).encode()


def v2_array_document(shape: tuple[int, ...], separator: str | None = None) -> bytes:
    fields = {"zarr_format": 2, "shape": shape, "chunks": [1] * len(shape), "dtype": "|u1"}
    fields |= {"compressor": None, "fill_value": 0, "order": "C", "filters": None}
    more = {} if separator is None else {"dimension_separator": separator}
    return json.dumps(fields | more).encode()


def _documents(model: dict[str, bytes], path: str) -> dict[str, bytes]:
    """Those that make the node at the path."""
    keys = {name: join(path, name) for name in DOCUMENTS}
    return node_documents({name: model[key] for name, key in keys.items() if key in model})


def _array(model: dict[str, bytes], path: str) -> ArrayMeta | None:
    meta = parse_documents(_documents(model, path))
    return meta if isinstance(meta, ArrayMeta) else None


def _owner(model: dict[str, bytes], key: str) -> tuple[str, tuple[int, ...]] | None:
    """The array (the one with the longest path first) whose chunk the key is."""
    segments = key.split("/")
    for n in range(len(segments) - 1, -1, -1):
        path, rest = "/".join(segments[:n]), "/".join(segments[n:])
        meta = _array(model, path)
        if meta is not None:
            coords = meta.chunk_keys.decode(rest, len(meta.shape))
            if coords is not None and coords in meta.grid:
                return path, coords
    return None


def model_set(model: dict[str, bytes], key: str, data: bytes) -> None:
    """A dict's `set`, but that a shrunken array loses the chunks that are cut off."""
    path, _, name = key.rpartition("/")
    if name in DOCUMENTS:
        after = {**model, key: data}
        was, new = _array(model, path), _array(after, path)
        formats = {V3_DOCUMENT in _documents(state, path) for state in (model, after)}
        if was is not None and new is not None and was.same_chunking(new) and len(formats) == 1:
            for other in list(model):
                owner = _owner(model, other)
                if owner is not None and owner[0] == path and owner[1] not in new.grid:
                    del model[other]
    model[key] = data


# --- the machine -----------------------------------------------------------------------------

_PATHS = ["", "a", "a/b", "a/c", "g"]
_RESTS = ["c/0", "c/1", "c/2", "c/3", "c/0/1", "c/1/1", "c"]
_RESTS += ["0", "1", "2", "3", "0/1", "1/1", "0.1", "1.1", "c/01", "c/+1"]
_OTHER_KEYS = [".zmetadata", "a/b/b/c/0", "x/y/z", "c/9999999999999999999", "a/zarr.json/c/0"]
_OTHER_KEYS += ["a/.zarray/0", "ab/c/0"]
_CHUNK_KEYS = [f"{path}/{rest}".lstrip("/") for path in _PATHS for rest in _RESTS] + _OTHER_KEYS
_V3_KEYS = [join(path, "zarr.json") for path in _PATHS]
_V2_KEYS = [join(path, name) for path in _PATHS[:3] for name in DOCUMENTS[1:]]
_DOCUMENT_KEYS = _V3_KEYS + _V2_KEYS
_PREFIXES = ["", "a", "a/b", "a/c", "a/c/", "g", "c", "a/c/1", "x/y", "nothing"]

_shapes = st.one_of(
    st.just(()),
    st.tuples(st.integers(0, 4)),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
)
_v3_documents = st.one_of(
    st.builds(
        default_array,
        _shapes,
        st.sampled_from(["default", "v2"]),
        st.sampled_from(["/", "."]),
        st.integers(0, 1),
    ),
    st.builds(default_array, _shapes),
    st.builds(group_document, st.integers(0, 1)),
    st.sampled_from([b"", b"{", b"{}", b'{"zarr_format": 3, "node_type": "array"}']),
)
_v2_documents = st.one_of(
    st.builds(v2_array_document, _shapes, st.sampled_from([None, ".", "/"])),
    st.builds(v2_array_document, _shapes, st.just("/")),
    st.just(b'{"zarr_format": 2}'),
    st.sampled_from([b"{}", b"", b'{"_ARRAY_DIMENSIONS": ["b"]}', group_document()]),
)
_new_documents = st.one_of(
    st.tuples(st.sampled_from(_V3_KEYS), _v3_documents),
    st.tuples(st.sampled_from(_V2_KEYS), _v2_documents),
)
# Some fit in a manifest (4 bytes), some do not.
_values = st.binary(max_size=8)


class Machine(RuleBasedStateMachine):
    @initialize(
        deltas=st.integers(1, 4), spill_refs=st.sampled_from([1, 1_000]), pages=st.booleans()
    )
    def start(self, deltas: int, spill_refs: int, pages: bool) -> None:
        config = {
            "inline-chunk-bytes": 4,
            "compaction": {"max-delta-count": deltas},
            "pack-bytes": 20,
            "spill-refs": spill_refs,
        }
        self.small = ExitStack()  # few nodes make many pages of a base
        self.small.enter_context(small_node_pages() if pages else nullcontext())
        self.storage = MemoryStorage()
        self.repository = zm.create(self.storage, config)
        self.session = self.repository.writable_session()
        self.model: dict[str, bytes] = {}
        self.committed: dict[str, bytes] = {}
        self.history = [(self.session.snapshot_id, self.committed)]

    @rule(at=_new_documents)
    def set_document(self, at: tuple[str, bytes]) -> None:
        put(self.session.store, *at)
        model_set(self.model, *at)

    @rule(path=st.sampled_from(_PATHS[:3]), n=st.integers(0, 4), v2=st.booleans())
    def resize(self, path: str, n: int, v2: bool) -> None:
        document = v2_array_document((n,), "/") if v2 else default_array((n,))
        self.set_document((join(path, ".zarray" if v2 else "zarr.json"), document))

    @rule(keys=st.lists(st.sampled_from(_CHUNK_KEYS), min_size=1, max_size=6), data=_values)
    def set_values(self, keys: list[str], data: bytes) -> None:
        for i, key in enumerate(keys):
            put(self.session.store, key, data + bytes([i]))
            model_set(self.model, key, data + bytes([i]))

    @rule(key=st.sampled_from(_CHUNK_KEYS + _DOCUMENT_KEYS))
    def delete(self, key: str) -> None:
        self.session.store.delete_sync(key)
        self.model.pop(key, None)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def delete_existing(self, data: Any) -> None:
        self.delete(data.draw(st.sampled_from(sorted(self.model))))

    @rule(prefix=st.sampled_from(_PREFIXES))
    def delete_directory(self, prefix: str) -> None:
        directory = prefix.strip("/") + "/" if prefix else ""
        asyncio.run(self.session.store.delete_dir(prefix))
        for key in [key for key in self.model if key.startswith(directory)]:
            del self.model[key]

    @precondition(lambda self: self.session.status())
    @rule()
    def commit(self) -> None:
        snapshot_id = self.session.commit("so far")
        self.committed = dict(self.model)
        self.history.append((snapshot_id, self.committed))
        _check(self.repository.readonly_session().store, self.committed)

    @rule(keys=st.lists(st.sampled_from(_CHUNK_KEYS), max_size=4), data=_values)
    def fork_and_merge(self, keys: list[str], data: bytes) -> None:
        fork = self.session.fork()
        for key in keys:
            put(fork.store, key, data + b"fork")
            model_set(self.model, key, data + b"fork")
        self.session.merge(fork)

    @rule()
    def discard(self) -> None:
        self.session.discard_changes()
        self.model = dict(self.committed)

    @rule()
    def reopen(self) -> None:
        self.repository = zm.open(self.storage)
        self.session = self.repository.writable_session()
        self.model = dict(self.committed)

    @invariant()
    def reads_as_the_model(self) -> None:
        if hasattr(self, "session"):
            _check(self.session.store, self.model)

    def teardown(self) -> None:
        if hasattr(self, "session"):
            self.small.close()
            fresh = zm.open(self.storage)
            for snapshot_id, model in self.history:
                _check(fresh.readonly_session(snapshot_id).store, model)
            assert fresh.verify().problems == ()
            if not self.session.status():
                assert self.model == self.committed


async def _listed(store: ManifestStore) -> dict[str, tuple[set[str], list[str]]]:
    """By prefix: the names right below it, and the keys that start with it."""
    return {
        prefix: (
            {name async for name in store.list_dir(prefix)},
            [key async for key in store.list_prefix(prefix)],
        )
        for prefix in _PREFIXES
    }


def _check(store: ManifestStore, model: dict[str, bytes]) -> None:
    for key in {*model, *_CHUNK_KEYS, *_DOCUMENT_KEYS}:
        assert get(store, key) == model.get(key), key
    for prefix, (names, keys) in asyncio.run(_listed(store)).items():
        directory = prefix.strip("/") + "/" if prefix else ""
        below = {key[len(directory) :].split("/")[0] for key in model if key.startswith(directory)}
        assert names == below, prefix
        assert sorted(keys) == sorted(key for key in model if key.startswith(prefix)), prefix


def test_a_deleted_root_is_no_member_of_itself() -> None:
    session = zm.create(MemoryStorage()).writable_session()
    put(session.store, "c/0", b"opaque beside an array of format 2")
    put(session.store, ".zarray", v2_array_document((0,), "/"))
    session.commit("an array at the root")
    session.store.delete_sync(".zarray")
    assert asyncio.run(_listed(session.store))[""] == ({"c"}, ["c/0"])


@pytest.mark.hypothesis
def test_random_operations_against_a_dict() -> None:
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=examples(50),
            stateful_step_count=20,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),
        ),
    )
