"""What every storage must do, over every storage there is."""

import asyncio
import itertools
import json
import os
import pickle
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import obstore.store
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from effort import examples
from storages import CrashDisk
from zarr_manifests.errors import InvalidArgumentError, ObjectNotFoundError, StorageError
from zarr_manifests.runtime import SYSTEM
from zarr_manifests.storage import Storage, from_url
from zarr_manifests.storage.fsspec_store import FsspecStorage, own_storage
from zarr_manifests.storage.local import LocalStorage
from zarr_manifests.storage.memory import MemoryStorage

_numbers = itertools.count()


def _in_bucket(scheme: str, **options: object) -> Callable[[Path], Storage]:
    def opened(path: Path) -> Storage:
        url = f"{scheme}://tests/contract-{os.getpid()}-{next(_numbers)}/{path.name}"
        return from_url(url, **options)

    return opened


def _client(path: Path) -> Any:
    bucket, _, prefix = _in_bucket("s3")(path).url.removeprefix("s3://").partition("/")
    return obstore.store.S3Store(bucket, prefix=prefix, client_options={"allow_http": True})


def _by_fsspec(protocol: str, opened: Callable[[Path], Storage]) -> Callable[[Path], Storage]:
    def by_fsspec(path: Path) -> Storage:
        # The environment points to other servers in other tests, and filesystems are cached.
        files = fsspec.filesystem(protocol, skip_instance_cache=True)
        return FsspecStorage(files, opened(path).url)

    return by_fsspec


_IN_AZURE = _in_bucket("az", allow_http=True)
BACKENDS: dict[str, tuple[str, Callable[[Path], Storage]]] = {
    "memory": ("", lambda path: MemoryStorage(f"contract-{next(_numbers)}")),
    "local": ("", LocalStorage),
    "crashable": ("", lambda path: CrashDisk(path).storage()),
    "s3": ("ministack", _in_bucket("s3")),
    "s3 by obstore": ("ministack", lambda path: own_storage(_client(path))),
    "s3 by s3fs": ("ministack", _by_fsspec("s3", _in_bucket("s3"))),
    "moto": ("moto", _in_bucket("s3")),
    "azurite": ("azurite", _IN_AZURE),
    "azurite by adlfs": ("azurite", _by_fsspec("az", _IN_AZURE)),
    "google": ("google", _in_bucket("gs", allow_http=True)),
}
"""By name: the server that it needs, and how it is opened."""
QUICK = ("memory", "local", "s3")


def _marked(names: Iterable[str]) -> list[Any]:
    """The names as parameters; tests of all storages but three are run by `make servers`."""
    return [n if n in QUICK else pytest.param(n, marks=pytest.mark.servers) for n in names]


PICKLABLE = _marked(name for name in BACKENDS if "crashable" not in name)
SHARED = _marked(["local", *(n for n in BACKENDS if BACKENDS[n][0])])


@pytest.fixture(autouse=True)
def _server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    callspec = getattr(request.node, "callspec", None)
    for name in BACKENDS.keys() & set(callspec.params.values() if callspec else ()):
        if BACKENDS[name][0]:
            server = request.getfixturevalue("server_named")(BACKENDS[name][0])
            for variable, value in server.environment.items():
                monkeypatch.setenv(variable, value)


@pytest.fixture(params=_marked(BACKENDS))
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return BACKENDS[request.param][1](tmp_path / "repository")


# --- one call at a time ----------------------------------------------------------------------


def test_a_view_is_its_owners_again_once_it_is_written(storage: Storage) -> None:
    owned = bytearray(b"as it was" * 100_000)
    with memoryview(owned) as view:
        assert storage.create("a", view, durable=False)
    owned[:] = b"something" * 100_000
    assert storage.get("a") == b"as it was" * 100_000
    with memoryview(owned) as view:
        assert not storage.create("a", view)
    assert storage.get("a") == b"as it was" * 100_000


def test_what_is_created_is_there_and_stays(storage: Storage) -> None:
    data = bytes(range(256)) * 4096
    assert storage.create("a/b", data)
    assert not storage.create("a/b", b"second")
    assert storage.get("a/b") == storage.get_tagged("a/b").data == data
    assert storage.head("a/b").nbytes == len(data)
    assert storage.create("empty", b"")
    assert storage.get("empty") == b""


def test_ranges_give_what_there_is(storage: Storage) -> None:
    data = b"0123456789"
    storage.create("a", data)
    for start in (0, 1, 10, 2**62):
        assert storage.get("a", start) == data[start:]
        for length in (0, 1, 10, 2**70):
            expected = data[start : start + length]
            assert storage.get("a", start, length) == expected
            assert asyncio.run(storage.get_async("a", start, length)) == expected
    for start, length in ((-1, 1), (0, -1), (2**62 + 1, 1)):
        with pytest.raises(InvalidArgumentError):
            storage.get("a", start, length)


def test_what_is_absent_is_an_error_of_its_own(storage: Storage) -> None:
    calls: list[Callable[[str], object]] = [
        storage.get,
        lambda key: storage.get(key, 0, 0),
        storage.get_tagged,
        storage.head,
        lambda key: storage.sync([key]),
    ]
    storage.create("a/b", b"x")
    for key, call in itertools.product(["a/absent", "absent/a"], calls):
        with pytest.raises(ObjectNotFoundError, match=key):
            call(key)


def test_a_swap_takes_the_token_of_the_version_that_is_there(storage: Storage) -> None:
    first = storage.cas("a", b"1", None)
    assert first is not None
    second = storage.cas("a", b"2", first)
    assert second not in (None, first)
    assert storage.cas("a", b"3", first) is None
    assert storage.cas("a", b"3", None) is None
    tagged = storage.get_tagged("a")
    assert (tagged.data, tagged.token) == (b"2", second)
    storage.delete_many(["a"])
    assert storage.cas("a", b"4", second) is None
    assert list(storage.list()) == []
    assert storage.cas("a", b"4", None) is not None


def test_then_create_follows_a_swap(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = replace(SYSTEM, background=lambda call: call())
    for module in ("object_store", "fsspec_store"):
        monkeypatch.setattr(f"zarr_manifests.storage.{module}.SYSTEM", at_once)
    token = storage.cas("a", b"1", None, then_create=("archive/1", b"one"))
    assert storage.cas("a", b"x", "stale", then_create=("archive/x", b"x")) is None
    # That it is there already is not the swap's business.
    assert storage.cas("a", b"2", token, then_create=("archive/1", b"two")) is not None
    assert storage.cas("b", b"2", None, then_create=("archive/2", b"two")) is not None
    assert storage.get("archive/2") == b"two"
    assert storage.get("archive/1") == b"one"
    assert [info.key for info in storage.list("archive/")] == ["archive/1", "archive/2"]


def test_list_is_in_key_order(storage: Storage) -> None:
    # In the order of characters the slash comes after "-" and "." and before the digits.
    keys = ["a-b", "a.b", "a/b", "a/c/d", "a/c0", "a0", "root/1", "root/10", "root/2"]
    for key in reversed(keys):
        storage.create(key, key.encode())
    infos = list(storage.list())
    assert [info.key for info in infos] == keys == sorted(keys)
    assert [info.nbytes for info in infos] == [len(key) for key in keys]
    assert infos[0] == storage.head("a-b")
    for prefix in ("", "a", "a/c", "a/c/", "root/1", "x/y"):
        for after in ("", "a/", "a/c", "a/c/d", "root/11", "z"):
            expected = [key for key in keys if key.startswith(prefix) and key > after]
            assert [info.key for info in storage.list(prefix, after)] == expected, (prefix, after)


def test_list_is_lazy_and_bears_changes(storage: Storage) -> None:
    for i in range(5):
        storage.create(f"a/{i}", b"x")
        storage.create(f"b/{i}", b"x")
    listing = storage.list()
    assert next(listing).key == "a/0"
    deleted = {"a/3", "b/1"}
    storage.delete_many(sorted(deleted))
    listed = [info.key for info in listing]
    kept = [f"{ab}/{i}" for ab in "ab" for i in range(5) if f"{ab}/{i}" not in {"a/0", *deleted}]
    if storage.capabilities.inline:
        assert listed == kept
    # Far away a listing comes in pages, which are not asked for twice.
    assert [key for key in listed if key not in deleted] == kept
    assert listed == sorted(set(listed))


def test_bad_keys_are_refused_everywhere(storage: Storage) -> None:
    calls: list[Callable[[str], object]] = [
        storage.get,
        storage.get_tagged,
        lambda key: storage.put(key, b""),
        lambda key: storage.create(key, b""),
        lambda key: storage.cas(key, b"", None),
        storage.head,
        lambda key: storage.delete_many([key]),
        lambda key: storage.sync([key]),
    ]
    bad = ["", "/a", "a//b", "..", "a/../b", ".hidden", "a b", "a\\b", "a\0", "å", "x" * 201]
    for key, call in itertools.product(bad, calls):
        with pytest.raises(InvalidArgumentError, match="storage key"):
            call(key)
    for prefix in ("/", "../", ".lock", "a//", "a b"):
        with pytest.raises(InvalidArgumentError, match="storage key"):
            storage.list(prefix)
    assert list(storage.list()) == []


async def test_async_twins(storage: Storage) -> None:
    assert await storage.create_async("a", b"0123")
    assert not await storage.create_async("a", b"x", durable=False)
    assert await storage.get_async("a", 1, 2) == b"12"
    assert await storage.get_async("a") == b"0123"
    with pytest.raises(ObjectNotFoundError):
        await storage.get_async("b")


# --- against a model -------------------------------------------------------------------------

KEYS = st.sampled_from(["a", "b-c", "b.c", "b/x", "b/y/z", "b0", "root/1", "root/2"])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["put", "create", "delete", "get", "head"]), KEYS),
        st.tuples(st.sampled_from(["cas", "cas stale", "cas none"]), KEYS),
        st.tuples(st.just("list"), st.sampled_from(["", "b", "b/", "root/"])),
    ),
    max_size=20,
)


class _Model:
    """A dict and, beside it, a storage that must do the same."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.objects: dict[str, bytes] = {}
        self.tokens: dict[str, list[str]] = {}

    def _wrote(self, key: str, data: bytes, token: str | None = None) -> None:
        self.objects[key] = data
        now = self.storage.get_tagged(key)
        assert now.data == data
        assert token in (None, now.token)
        self.tokens.setdefault(key, []).append(now.token)

    def step(self, op: str, key: str, data: bytes) -> None:
        storage, there = self.storage, self.objects.get(key)
        if op == "put":
            storage.put(key, data)
            self._wrote(key, data)
        elif op == "create":
            assert storage.create(key, data) == (there is None)
            if there is None:
                self._wrote(key, data)
        elif op == "delete":
            storage.delete_many([key])
            self.objects.pop(key, None)
        elif op == "list":
            expected = [(k, len(v)) for k, v in sorted(self.objects.items()) if k.startswith(key)]
            assert [(info.key, info.nbytes) for info in storage.list(key)] == expected
        elif op.startswith("cas"):
            self._cas(op, key, data)
        elif there is None:
            with pytest.raises(ObjectNotFoundError):
                getattr(storage, op)(key)
        elif op == "get":
            assert storage.get(key) == there
            assert storage.get(key, 1, 2) == there[1:3]
        else:
            assert storage.head(key).nbytes == len(there)

    def _cas(self, op: str, key: str, data: bytes) -> None:
        seen = self.tokens.get(key, [])
        token, holds = None, key not in self.objects
        if op == "cas" and seen:
            token, holds = seen[-1], key in self.objects
        elif op == "cas stale" and len(seen) > 1:
            token, holds = seen[-2], False
        new = self.storage.cas(key, data, token)
        assert (new is not None) == holds
        if new is not None:
            self._wrote(key, data, new)


@pytest.mark.parametrize("backend", _marked(BACKENDS))
@settings(max_examples=examples(25), suppress_health_check=[HealthCheck.too_slow])
@given(steps=STEPS)
def test_it_does_what_a_dict_does(backend: str, steps: list[tuple[str, str]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = _Model(BACKENDS[backend][1](Path(folder) / "repository"))
        for number, (op, key) in enumerate(steps):
            model.step(op, key, b"%d." % number + b"x" * (number % 5))
        assert {i.key: model.storage.get(i.key) for i in model.storage.list()} == model.objects


# --- races -----------------------------------------------------------------------------------

RACERS = 16


def _race(run: Callable[[int], object]) -> None:
    barrier = threading.Barrier(RACERS)

    def racer(number: int) -> None:
        barrier.wait()
        run(number)

    with ThreadPoolExecutor(RACERS) as pool:
        list(pool.map(racer, range(RACERS)))  # raises what any of them raised


def test_one_of_many_creates_wins(storage: Storage) -> None:
    won: list[tuple[str, bytes]] = []  # append is atomic

    def run(number: int) -> None:
        for i in range(10):
            data = b"%d" % number
            if storage.create(f"race/{i}", data):
                won.append((f"race/{i}", data))
            assert storage.get(f"race/{i}").isdigit()  # whole, whoever won

    _race(run)
    assert len(won) == 10
    assert sorted(won) == [(info.key, storage.get(info.key)) for info in storage.list("race/")]


def _increment(storage: Storage, who: str, times: int) -> None:
    """Count up by `times`, by swapping; each payload is unique."""
    for turn in range(times):
        while True:
            now = storage.get_tagged("counter")
            value = int(now.data.split()[0]) + 1
            if storage.cas("counter", f"{value} {who} {turn}".encode(), now.token) is not None:
                break


def test_no_increment_is_lost(storage: Storage) -> None:
    storage.create("counter", b"0 start")
    _race(lambda number: _increment(storage, str(number), 3))
    assert storage.get("counter").split()[0] == b"%d" % (3 * RACERS)


RACING_PROCESS = """
import json, pickle, sys
storage = pickle.loads(bytes.fromhex(sys.argv[1]))
who = sys.argv[2]
print("ready", flush=True)
sys.stdin.readline()
won = [i for i in range(20) if storage.create(f"race/{i}", who.encode())]
for turn in range(8):
    while True:
        now = storage.get_tagged("counter")
        value = int(now.data.split()[0]) + 1
        if storage.cas("counter", f"{value} {who} {turn}".encode(), now.token) is not None:
            break
print(json.dumps(won))
"""


@pytest.mark.parametrize("backend", SHARED)
def test_races_between_processes(backend: str, tmp_path: Path) -> None:
    storage = BACKENDS[backend][1](tmp_path / "repository")
    storage.create("counter", b"0 start")
    command = [sys.executable, "-c", RACING_PROCESS, pickle.dumps(storage).hex()]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes: list[Any] = [subprocess.Popen([*command, str(i)], **pipes) for i in range(4)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    won: list[int] = []
    for process in processes:
        answer, _ = process.communicate()
        assert process.returncode == 0
        won += json.loads(answer)
    assert sorted(won) == list(range(20))
    assert storage.get("counter").split()[0] == b"32"


# --- pickles and forks -----------------------------------------------------------------------


@pytest.mark.parametrize("backend", PICKLABLE)
def test_a_pickle_opens_the_same_objects(backend: str, tmp_path: Path) -> None:
    storage = BACKENDS[backend][1](tmp_path / "repository")
    storage.create("a", b"1")
    copy = pickle.loads(pickle.dumps(storage))
    assert type(copy) is type(storage)
    assert copy.get("a") == b"1"
    assert copy.create("b", b"2")
    assert storage.get("b") == b"2"
    assert copy.url == storage.url
    assert copy.capabilities == storage.capabilities


def test_a_nameless_memory_storage_is_not_pickled() -> None:
    with pytest.raises(StorageError, match="without a name cannot be pickled"):
        pickle.dumps(MemoryStorage())


@pytest.mark.parametrize("setup", ["", "MemoryStorage('mine').put('a', b'other');"])
def test_a_memory_storage_is_of_no_use_in_another_process(setup: str) -> None:
    storage = MemoryStorage("mine")
    storage.put("a", b"1")
    assert pickle.loads(pickle.dumps(storage)).get("a") == b"1"
    script = (
        f"import pickle; from zarr_manifests.storage.memory import MemoryStorage; {setup}"
        f"storage = pickle.loads(bytes.fromhex('{pickle.dumps(storage).hex()}'));"
        "print('unpickled', flush=True); storage.get('a')"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (1, "unpickled\n")
    assert "StorageError: memory://mine exists only in the process that made it" in done.stderr
