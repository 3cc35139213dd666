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
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from effort import examples
from zarr_manifests.error_cases import ObjectNotFoundError
from zarr_manifests.errors import InvalidArgumentError, StorageError
from zarr_manifests.storage import Storage, from_fsspec, from_obstore, from_url, fsspec_writer
from zarr_manifests.storage.disk import PosixDisk
from zarr_manifests.storage.local import LocalStorage
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.storage.protocol import check_key
from zarr_manifests.testing import (
    CountingStorage,
    CrashDisk,
    FaultyStorage,
    LatencyStorage,
    WrappedStorage,
)

_numbers = itertools.count()


def _memory(path: Path) -> MemoryStorage:
    return MemoryStorage(f"contract-{next(_numbers)}")


def _in_bucket(scheme: str) -> Callable[[Path], Storage]:
    def opened(path: Path) -> Storage:
        name = "".join(c for c in path.name if c != "%")
        url = f"{scheme}://tests/contract-{os.getpid()}-{next(_numbers)}/{name}"
        return from_url(url, **OPTIONS.get(scheme, {}))

    return opened


def _memory_files() -> Any:
    return pytest.importorskip("fsspec").filesystem("memory")


def _s3fs() -> Any:
    # The environment points to other servers in other tests, and filesystems are cached.
    return pytest.importorskip("s3fs").S3FileSystem(endpoint_url=os.environ["AWS_ENDPOINT_URL"])


def _adlfs() -> Any:
    return pytest.importorskip("adlfs").AzureBlobFileSystem()  # as the environment says


def _client(path: Path) -> Any:
    stores = pytest.importorskip("obstore.store")
    bucket, _, prefix = _in_bucket("s3")(path).url.removeprefix("s3://").partition("/")
    return stores.S3Store(bucket, prefix=prefix, client_options={"allow_http": True})


BACKENDS: dict[str, Callable[[Path], Storage]] = {
    "memory": _memory,
    "local": LocalStorage,
    "local, named temps": lambda path: LocalStorage(path, disk=PosixDisk(anonymous=False)),
    "crashable": lambda path: CrashDisk(path).storage(),
    "crashable, named temps": lambda path: CrashDisk(path, anonymous=False).storage(),
    "wrapped local": lambda path: WrappedStorage(LocalStorage(path)),
    "counting local": lambda path: CountingStorage(LocalStorage(path)),
    "latency memory": lambda path: LatencyStorage(_memory(path), latency_s=0),
    "faultless memory": lambda path: FaultyStorage(_memory(path)),
    "fsspec, single writer": lambda path: from_fsspec(_memory_files(), f"/{path}", "single-writer"),
    "s3": _in_bucket("s3"),
    "s3 by obstore": lambda path: from_obstore(_client(path)),
    "s3 by s3fs": lambda path: from_fsspec(_s3fs(), _in_bucket("s3")(path).url, "proven"),
    "moto": _in_bucket("s3"),
    "azurite": _in_bucket("az"),
    "azurite by adlfs": lambda path: from_fsspec(_adlfs(), _in_bucket("az")(path).url, "proven"),
    "google": _in_bucket("gs"),
}
OPTIONS: dict[str, dict[str, object]] = {
    scheme: {"allow_http": True} for scheme in ("az", "abfs", "gs")
}
SERVED = {
    "s3": "ministack",
    "s3 by obstore": "ministack",
    "s3 by s3fs": "ministack",
    "moto": "moto",
    "azurite": "azurite",
    "azurite by adlfs": "azurite",
    "google": "google",
}


def _marked(names: Iterable[str]) -> list[Any]:
    """The names as parameters; tests of all servers but one are run by `make servers`."""
    slow = SERVED.keys() - {"s3"}
    return [pytest.param(n, marks=pytest.mark.servers) if n in slow else n for n in names]


PICKLABLE = _marked(name for name in BACKENDS if "crashable" not in name)
_ONE_PROCESS = ("crashable", "memory", "single writer")
SHARED = _marked(n for n in BACKENDS if not any(part in n for part in _ONE_PROCESS))


@pytest.fixture(autouse=True)
def _server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    callspec = getattr(request.node, "callspec", None)
    monkeypatch.setattr(fsspec_writer, "_SETTLE_S", 0)
    for name in SERVED.keys() & set(callspec.params.values() if callspec else ()):
        server = request.getfixturevalue("server_named")(SERVED[name])
        for variable, value in server.environment.items():
            monkeypatch.setenv(variable, value)


@pytest.fixture(params=_marked(BACKENDS))
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return BACKENDS[request.param](tmp_path / "repository")


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


def test_it_is_a_storage(storage: Storage) -> None:
    assert isinstance(storage, Storage)
    assert storage.capabilities.create
    assert storage.capabilities.cas


def test_what_is_created_is_there_and_stays(storage: Storage) -> None:
    assert storage.create("a/b", b"first")
    assert not storage.create("a/b", b"second")
    assert storage.get("a/b") == b"first"


def test_put_replaces(storage: Storage) -> None:
    storage.put("a", b"first")
    storage.put("a", b"2", durable=False)
    assert storage.get("a") == b"2"


@pytest.mark.parametrize("data", [b"", b"x", bytes(range(256)) * 4096])
def test_bytes_come_back_as_they_were(storage: Storage, data: bytes) -> None:
    storage.create("a", data)
    assert storage.get("a") == data
    assert storage.get_tagged("a").data == data
    assert storage.head("a").nbytes == len(data)


def test_ranges_give_what_there_is(storage: Storage) -> None:
    data = b"0123456789"
    storage.create("a", data)
    for start in (0, 1, 9, 10, 11, 2**40, 2**62):
        assert storage.get("a", start) == data[start:]
        for length in (0, 1, 9, 10, 11, 2**40, 2**70):
            expected = data[start : start + length]
            assert storage.get("a", start, length) == expected
            assert storage.get_ranges("a", [(start, length), (0, 3)]) == [expected, b"012"]
            assert asyncio.run(storage.get_async("a", start, length)) == expected


def test_no_ranges_are_no_error(storage: Storage) -> None:
    storage.create("a", b"0123456789")
    assert storage.get_ranges("a", []) == []


@pytest.mark.parametrize(("start", "length"), [(-1, 1), (0, -1), (2**62 + 1, 1)])
def test_ranges_without_meaning_are_refused(storage: Storage, start: int, length: int) -> None:
    storage.create("a", b"0123456789")
    with pytest.raises(InvalidArgumentError, match="byte range"):
        storage.get("a", start, length)
    with pytest.raises(InvalidArgumentError, match="byte range"):
        storage.get_ranges("a", [(0, 1), (start, length)])


@pytest.mark.parametrize(
    "read",
    [
        lambda storage, key: storage.get(key),
        lambda storage, key: storage.get(key, 0, 0),
        lambda storage, key: storage.get_ranges(key, []),
        lambda storage, key: storage.get_tagged(key),
        lambda storage, key: storage.head(key),
        lambda storage, key: storage.sync([key]),
    ],
)
@pytest.mark.parametrize("key", ["absent", "a/absent", "absent/a"])
def test_absent_objects(storage: Storage, read: Callable[[Storage, str], object], key: str) -> None:
    with pytest.raises(ObjectNotFoundError, match=key):  # before anything has been written too
        read(storage, key)
    storage.create("a/b", b"x")
    with pytest.raises(ObjectNotFoundError, match=key):
        read(storage, key)


def test_cas_takes_the_token_of_the_version_that_is_there(storage: Storage) -> None:
    first = storage.cas("a", b"1", None)
    assert first is not None
    assert storage.get_tagged("a").token == first
    second = storage.cas("a", b"2", first)
    assert second is not None
    assert second != first
    assert storage.cas("a", b"3", first) is None
    assert storage.cas("a", b"3", None) is None
    assert storage.get_tagged("a") == type(storage.get_tagged("a"))(b"2", second)


def test_cas_of_an_absent_object(storage: Storage) -> None:
    token = storage.cas("a", b"1", None)
    storage.delete_many(["a"])
    assert storage.cas("a", b"2", token) is None
    assert list(storage.list()) == []
    assert storage.cas("a", b"2", None) is not None


def test_cas_sees_put(storage: Storage) -> None:
    token = storage.cas("a", b"1", None)
    storage.put("a", b"2")
    assert storage.cas("a", b"3", token) is None
    assert storage.cas("a", b"3", storage.get_tagged("a").token) is not None


def _wait_for(storage: Storage, key: str) -> bytes:
    for _ in range(2000):
        try:
            return storage.get(key)
        except ObjectNotFoundError:
            threading.Event().wait(0.001)
    return storage.get(key)


def test_then_create_follows_a_swap(storage: Storage) -> None:
    token = storage.cas("a", b"1", None, then_create=("archive/1", b"one"))
    assert _wait_for(storage, "archive/1") == b"one"
    assert storage.cas("a", b"x", "stale", then_create=("archive/x", b"x")) is None
    # That it is there already is not the swap's business.
    assert storage.cas("a", b"2", token, then_create=("archive/1", b"two")) is not None
    assert storage.cas("b", b"2", None, then_create=("archive/2", b"two")) is not None
    assert _wait_for(storage, "archive/2") == b"two"
    assert storage.get("archive/1") == b"one"
    assert [info.key for info in storage.list("archive/")] == ["archive/1", "archive/2"]


def test_then_create_with_a_bad_key_is_refused_before_the_swap(storage: Storage) -> None:
    with pytest.raises(InvalidArgumentError):
        storage.cas("a", b"1", None, then_create=("../x", b""))
    assert list(storage.list()) == []


def test_delete_many(storage: Storage) -> None:
    storage.delete_many(["never/there"])
    for key in ("a", "b/c", "b/d"):
        storage.create(key, b"x")
    storage.delete_many(iter(["a", "b/d", "b/x", "x/y"]))
    assert [info.key for info in storage.list()] == ["b/c"]
    assert storage.create("a", b"again")


def test_sync_takes_any_iterable(storage: Storage) -> None:
    storage.create("a/b", b"1", durable=False)
    storage.create("c", b"2", durable=False)
    storage.sync(iter(["a/b", "c", "a/b"]))
    storage.sync([])
    assert storage.get("a/b") == b"1"


def test_list_is_in_key_order(storage: Storage) -> None:
    # In the order of characters the slash comes after "-" and "." and before the digits.
    keys = ["a-b", "a.b", "a/b", "a/c/d", "a/c0", "a0", "b/x", "root/1", "root/10", "root/2"]
    for key in reversed(keys):
        storage.create(key, key.encode())
    infos = list(storage.list())
    assert [info.key for info in infos] == keys == sorted(keys)
    assert [info.nbytes for info in infos] == [len(key) for key in keys]
    assert infos[0] == storage.head("a-b")
    for prefix in ("", "a", "a/", "a/c", "a/c/", "root/1", "rootx", "x/y", "a-b"):
        for after in ("", "a", "a/", "a/b", "a/c", "a/c/d", "a0", "root/1", "root/11", "z"):
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


BAD_KEYS = [
    "", "/", "/a", "a/", "a//b", ".", "..", "../a", "a/../b", "a/.", ".hidden", "a/.hidden",
    "a b", "a\\b", "a\n", "a\0", "å", "a:b", "~", "x" * 201, "a/" * 300 + "a",
]  # fmt: skip


def test_bad_keys_are_refused_everywhere(storage: Storage) -> None:
    calls: list[Callable[[str], object]] = [
        storage.get,
        lambda key: storage.get_ranges(key, [(0, 1)]),
        storage.get_tagged,
        lambda key: storage.put(key, b""),
        lambda key: storage.create(key, b""),
        lambda key: storage.cas(key, b"", None),
        storage.head,
        lambda key: storage.delete_many([key]),
        lambda key: storage.sync([key]),
    ]
    for key, call in itertools.product(BAD_KEYS, calls):
        with pytest.raises(InvalidArgumentError, match="storage key"):
            call(key)


def test_bad_prefixes_are_refused(storage: Storage) -> None:
    for prefix in ("/", "..", "../", "a/../", ".lock", "a//", "a b"):
        with pytest.raises(InvalidArgumentError, match="prefix"):
            storage.list(prefix)


@pytest.mark.parametrize("key", ["a", "a.b", "_", "-x", "A9/b-c_d.e", "x" * 200])
def test_good_keys(key: str) -> None:
    assert check_key(key) == key


async def test_async_twins(storage: Storage) -> None:
    assert await storage.create_async("a", b"0123")
    assert not await storage.create_async("a", b"x", durable=False)
    assert await storage.get_async("a", 1, 2) == b"12"
    assert await storage.get_async("a") == b"0123"
    with pytest.raises(ObjectNotFoundError):
        await storage.get_async("b")


def test_reading_makes_nothing(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "deep" / "repository")
    assert list(storage.list()) == []
    storage.delete_many(["a"])
    with pytest.raises(ObjectNotFoundError):
        storage.get("a")
    assert storage.cas("a", b"1", "some token") is None
    assert list(tmp_path.iterdir()) == []


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
        model = _Model(BACKENDS[backend](Path(folder) / "repository"))
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


def test_one_of_many_first_swaps_wins_against_creates(storage: Storage) -> None:
    won: list[int] = []

    def run(number: int) -> None:
        for i in range(8):
            data = b"%d" % number
            if number % 2:
                winner = storage.cas(f"k{i}", data, None) is not None
            else:
                winner = storage.create(f"k{i}", data)
            if winner:
                won.append(i)

    _race(run)
    assert sorted(won) == list(range(8))


RACING_PROCESS = """
import json, pickle, sys
storage = pickle.loads(bytes.fromhex(sys.argv[1]))
who = sys.argv[2]
print("ready", flush=True)
sys.stdin.readline()
won = [i for i in range(40) if storage.create(f"race/{i}", who.encode())]
for turn in range(15):
    while True:
        now = storage.get_tagged("counter")
        value = int(now.data.split()[0]) + 1
        if storage.cas("counter", f"{value} {who} {turn}".encode(), now.token) is not None:
            break
print(json.dumps(won))
"""


def _processes(storage: Storage, script: str, count: int) -> Iterator[subprocess.Popen[str]]:
    pickled = pickle.dumps(storage).hex()
    for i in range(count):
        yield subprocess.Popen(
            [sys.executable, "-c", script, pickled, str(i)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param(one, marks=pytest.mark.sweep) if "local" in one and one != "local" else one
        for one in SHARED
    ],
)
def test_races_between_processes(backend: str, tmp_path: Path) -> None:
    storage = BACKENDS[backend](tmp_path / "repository")
    storage.create("counter", b"0 start")
    processes = list(_processes(storage, RACING_PROCESS, 4))
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    won: list[int] = []
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        answer, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        won += json.loads(answer)
    assert sorted(won) == list(range(40))
    assert storage.get("counter").split()[0] == b"60"


# --- pickles and forks -----------------------------------------------------------------------


@pytest.mark.parametrize("backend", PICKLABLE)
def test_a_pickle_opens_the_same_objects(backend: str, tmp_path: Path) -> None:
    storage = BACKENDS[backend](tmp_path / "repository")
    storage.create("a", b"1")
    copy = pickle.loads(pickle.dumps(storage))
    assert type(copy) is type(storage)
    assert copy.get("a") == b"1"
    assert copy.create("b", b"2")
    assert storage.get("b") == b"2"
    assert copy.url == storage.url
    assert copy.capabilities == storage.capabilities


@pytest.mark.parametrize("backend", SHARED)
def test_the_url_opens_the_same_objects(backend: str, tmp_path: Path) -> None:
    storage = BACKENDS[backend](tmp_path / "a name with % and ü")
    storage.create("a", b"1")
    options = OPTIONS.get(storage.url.partition(":")[0], {})
    assert from_url(storage.url, **options).get("a") == b"1"


def test_a_nameless_memory_storage_is_not_pickled() -> None:
    with pytest.raises(StorageError, match="without a name cannot be pickled"):
        pickle.dumps(MemoryStorage())


@pytest.mark.parametrize("setup", ["", "MemoryStorage('mine').put('a', b'other');"])
def test_a_memory_storage_is_of_no_use_in_another_process(setup: str) -> None:
    storage = MemoryStorage("mine")
    storage.put("a", b"1")
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


FORKING_PROCESS = """
import os, pickle, sys, threading
from zarr_manifests.storage.local import LocalStorage
from zarr_manifests.storage.memory import MemoryStorage
storage = pickle.loads(bytes.fromhex(sys.argv[1])) if sys.argv[2] == "0" else MemoryStorage("m")
storage.create("counter", b"0 start")
stop = threading.Event()

def swap():
    while not stop.is_set():
        now = storage.get_tagged("counter")
        storage.cas("counter", os.urandom(9), now.token)

threads = [threading.Thread(target=swap) for _ in range(3)]
for thread in threads:
    thread.start()
failed = 0
for i in range(10):  # each at another moment of the swaps
    child = os.fork()
    if child == 0:
        now = storage.get_tagged("counter")
        won = storage.create(f"child/{i}", b"x")
        storage.cas("counter", os.urandom(9), now.token)
        os._exit(0 if won else 1)
    failed += os.waitpid(child, 0)[1] != 0
stop.set()
for thread in threads:
    thread.join()
print(failed, len(list(storage.list("child/"))))
"""


@pytest.mark.parametrize(("kind", "seen"), [(0, 10), (1, 0)], ids=["local", "memory"])
def test_forked_children_work_amid_swaps(kind: int, seen: int, tmp_path: Path) -> None:
    pickled = pickle.dumps(LocalStorage(tmp_path)).hex()
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKING_PROCESS, pickled, str(kind)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == f"0 {seen}\n", done.stderr


FORKING_AMID_A_WRITE = """
import os, signal, threading
from zarr_manifests.storage.memory import MemoryStorage

inside, forking = threading.Event(), threading.Event()
os.register_at_fork(before=forking.set)  # called before what the storage has registered
class Slow(bytes):
    def __bytes__(self):
        inside.set()
        forking.wait(60)
        return b"slow"

storage = MemoryStorage()
writer = threading.Thread(target=storage.put, args=("a", Slow(b"x")))
writer.start()
inside.wait()  # the writer holds the lock
child = os.fork()
if child == 0:
    signal.alarm(60)
    os._exit(0 if storage.create("b", b"1") and storage.get("a") == b"slow" else 1)
writer.join()
print(os.waitpid(child, 0)[1])
"""


def test_a_fork_amid_a_write_to_memory_leaves_the_child_a_free_lock() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKING_AMID_A_WRITE],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "0\n", done.stderr
