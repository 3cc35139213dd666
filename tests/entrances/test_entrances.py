"""Every public entrance, called with values that nobody expects.

The entrances are found by introspection. One of which a parameter has no values here fails, and so
does one that cannot be reached. Each call returns, or raises one of the package's errors;
`TypeError` and `AttributeError` only where a value is of another type than the signature says.
Afterwards what is left of a session is committed, and every reader finds a sound repository in
which what was there before is as it was. `--examples N` tries more.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import itertools
import resource
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import obstore
import pytest
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st

import zarr_manifests as zm
from zarr_manifests import config as cf
from zarr_manifests.metrics import Meter, Metrics
from zarr_manifests.session import preload_report
from zarr_manifests.storage import Storage, from_fsspec, from_url, fsspec_writer
from zarr_manifests.storage.local import LocalStorage
from zarr_manifests.storage.memory import MemoryStorage
from zarr_manifests.storage.object_clients import Endpoint
from zarr_manifests.storage.object_versions import Version
from zarr_manifests.xarray import ManifestsBackendEntrypoint

HERE = Path(__file__).parent
HANG_S = 60
MEMORY_BYTES = 4 << 30


def _load(name: str) -> Any:
    found = sys.modules.get(f"entrances_{name}")
    if found is None:
        spec = importlib.util.spec_from_file_location(f"entrances_{name}", HERE / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        found = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found)
    return found


values, worlds = _load("values"), _load("world")
spark_session = importlib.import_module("zarr_manifests.spark.spark_session")
public = worlds.load("entrances_public", HERE.parent / "test_public_api.py")
Made, Values = values.Made, values.Values


def _in_filesystem(world: Any) -> Any:
    return from_fsspec(fsspec.filesystem("memory"), world.path(), "single-writer")


_options = vars(sys.modules[ManifestsBackendEntrypoint.__module__])["_options"]
"""What the engine takes besides a place."""

# --- which entrances there are ---------------------------------------------------------------

NOT_CALLED = {
    **dict.fromkeys(
        ("Repository", "Session", "Fork"), "made by the package, from what is not public"
    ),
    "Storage": "for who writes a storage",
    "VirtualAccessor": "made by xarray, as an attribute of a dataset",
}
"""Names of what is public and nobody calls with values of theirs, and why."""

UNTRIED = {
    "zarr_manifests.bulk": "for arrays, which are Zarr's",
    "zarr_manifests.errors": "raised by the package",
    "zarr_manifests.serving": "called over HTTP, in tests/serving",
}
"""Modules for who writes tests of the package."""


@dataclass(frozen=True)
class Entrance:
    """A function, a constructor, or a method of a class."""

    owner: type | None
    name: str
    call: Callable[..., Any]
    parameters: tuple[inspect.Parameter, ...]
    bound: bool = False

    def __str__(self) -> str:
        return f"{self.owner.__name__}.{self.name}" if self.owner else self.name


def _parameters(call: Callable[..., Any]) -> tuple[inspect.Parameter, ...]:
    found = inspect.signature(call).parameters.values()
    return tuple(p for p in found if p.name not in ("self", "cls"))


def _methods(kind: type) -> Iterator[Entrance]:
    """The public methods of a class, its own and those of the package that it inherits."""
    seen = set()
    for base in kind.__mro__:
        ours = base.__module__.startswith("zarr_manifests")
        for name, value in vars(base).items() if ours else ():
            plain = value.__func__ if isinstance(value, staticmethod | classmethod) else value
            if not name.startswith("_") and name not in seen and inspect.isfunction(plain):
                call = plain if plain is value else getattr(kind, name)
                # xarray asks the engine which options there are.
                says = _options if "options" in inspect.signature(plain).parameters else plain
                says = says if kind is ManifestsBackendEntrypoint else plain
                yield Entrance(kind, name, call, _parameters(says), bound=plain is value)
            seen.add(name)


def _entrances() -> Iterator[Entrance]:
    seen: set[Any] = set()
    for module in (*public.PUBLIC, "zarr_manifests.xarray"):  # with the engine
        if module in UNTRIED:
            continue
        for name in importlib.import_module(module).__all__:
            found = getattr(importlib.import_module(module), name)
            if callable(found) and found not in seen:
                seen.add(found)
                yield Entrance(None, name, found, _parameters(found))
                yield from _methods(found) if inspect.isclass(found) else ()


ALL = [*_entrances()]
ENTRANCES = [e for e in ALL if str(e) not in NOT_CALLED and e.owner is not Storage]

# --- what they are called on, and with -------------------------------------------------------


def _closed(w: Any) -> zm.Session:
    session = w.writing()
    session.close()
    return session


SESSIONS = (
    Made("a session with changes", lambda w: w.writing()),
    Made("a session", lambda w: w.held(w.repository.writable_session())),
    Made(
        "a serializable one",
        lambda w: w.held(w.repository.writable_session(isolation="serializable")),
    ),
    Made("a read-only one", lambda w: w.held(w.repository.readonly_session())),
    Made("a closed one", _closed),
)
OWNERS: dict[str, tuple[Any, ...]] = {
    "Repository": (Made("the repository", lambda w: w.repository),),
    "Session": SESSIONS,
    "ManifestStore": (
        *(Made(f"the store of {one}", lambda w, one=one: one.make(w).store) for one in SESSIONS),
        Made("the store of a fork", lambda w: w.writing().fork().store),
    ),
    "Fork": (
        Made("a fork", lambda w: w.writing().fork()),
        Made("a fork of a fork", lambda w: w.writing().fork().fork()),
    ),
    "HeldLease": (Made("a lease", lambda w: w.leased()),),
    "ChunkSelection": (
        Made("a selection", lambda w: w.repository.readonly_session().chunks_where("v", "v > 1")),
    ),
    "Diff": (Made("a difference", lambda w: w.repository.diff("main", "main")),),
    "PreloadReport": (Made("a report", lambda w: preload_report(w.repository.readonly_session())),),
    "ResolvedChunks": (Made("chunks", lambda w: w.repository.readonly_session().chunk_refs("v")),),
    "ManifestsBackendEntrypoint": (ManifestsBackendEntrypoint(),),
    "Meter": (Made("a meter", lambda _: Meter()),),
    "Metrics": (Metrics(),),
    "MemoryStorage": (Made("objects", lambda w: w.objects_apart(MemoryStorage())),),
    "LocalStorage": (Made("files", lambda w: w.objects_apart(LocalStorage(w.path()))),),
    "ObjectStorage": (Made("a bucket", lambda w: w.objects_apart(from_url("s3://b/x"))),),
    "FsspecStorage": (Made("a filesystem", lambda w: w.objects_apart(_in_filesystem(w))),),
    **{
        kind.__name__: (kind(*given),)
        for kind, given in (
            (cf.Config, ()),
            (cf.Cache, ()),
            (cf.CacheOptions, ()),
            (cf.ChunkManifests, ()),
            (cf.Commits, ()),
            (cf.Compaction, ()),
            (cf.ManifestSet, ("a",)),
            (cf.Preload, ()),
            (cf.Rule, ("default", "/a.*")),
            (cf.Snapshots, ()),
            (cf.Split, ("/a", (("time", 2),))),
        )
    },
}
NAMES = values.BY_NAME
CONFIGS = {
    "attempts": values.INT,
    "sets": Values(((), (cf.ManifestSet("a"),)), ((None,), "ab", ((),)), (5, None)),
    "rules": Values(((), (cf.Rule("default", "/a"),)), ((None,), ("x",)), (5, None)),
    "splitting": Values((None, ()), ((None,), ("x",)), (5, "x")),
    "preload": Values((cf.Preload(),), (), (5, None, "x")),
    "arrays": Values((None, ("/a",)), tuple((one,) for one in values.TEXT.extreme), (5, [5])),
    "branches": Values(((), ("main",)), tuple((one,) for one in values.TEXT.extreme), (5, [5])),
    "tags": Values(((), ("v1",)), tuple((one,) for one in values.TEXT.extreme), (5, [5])),
    "along": Values(
        ((("time", 2),),),
        (*values.TEXT.extreme, (), ((0, 0),), ((-1, 2**64),), (("\ud800", 1),), (("a",),)),
        (5, None, {"a": 1}, ((1.5, 1),)),
    ),
    **{
        name: Values((None,), tuple({"a": one} for one in values.INT.extreme), (5, "x", []))
        for name in ("commits", "compaction", "snapshots", "chunk_manifests")
    },
    "virtual_containers": Values(
        ((), (cf.SavedContainer("raw", "s3://b/x"),)), ((None,),), (5, "x", None)
    ),
    "url": Values(("s3://b/x",), values.TEXT.extreme, (5, None)),
    "region": Values((None, "eu-central-1"), values.TEXT.extreme, (5,)),
    "options": Values(({},), (*values.OPTIONS, *values.MAPS), values.NO_MAP),
    "saved": Values((None, cf.Cache())),
    "metadata_chunks": Values((0, 5), values.INT.extreme, (None, "1", 1.5)),
    "initialized_chunks": Values((0, 5), values.INT.extreme, (None, "1", 1.5)),
}
STORED = {
    "data": Values((b"x", b""), values.BYTES, ("text", None, 5)),
    "then_create": Values((None, ("after", b"y")), (("", b""), ("../x", b"y")), (5, "ab", ("a",))),
    "token": Values(
        (None, Made("the token", lambda w: w.apart.get_tagged("kept").token)),
        values.TEXT.extreme,
        (5, b"x", object()),
    ),
    "key": values.TEXT.plus("kept", "a/kept", "new", "a/new"),
    "known": Values((Version(), Version("x", 5, 5)), (Version("", 2**70, -1),), (None, 5)),
    "keys": Values(
        ((), ["kept"], ["kept", "a/kept", "absent"]),
        tuple([one] for one in values.TEXT.extreme),
        (None, 5, [None], [5], [b"x"]),
    ),
    "start": Values((0, 1, 3), values.INT.extreme, (None, "1", 1.5)),
    "length": Values((None, 0, 2), values.INT.extreme, ("1", 1.5)),
    "ranges": Values(
        ([], [(0, 1)], [(1, 2), (0, 1)]),
        tuple([(a, b)] for a in values.INT.extreme for b in (0, -1, 2**64)),
        (None, 5, [5], [(None, 1)], [("a", "b")]),
    ),
    "name": values.TEXT.plus("compaction"),
    "disk": Values((None,)),
    "path": Values(
        (Made("a new folder", lambda w: w.path()),), NAMES["location"].extreme, (None, 5, object())
    ),
    "url": Values(("memory://x", "new"), NAMES["location"].extreme, (None, 5, object())),
    "options": values.MAP.plus({}, {"force": True}, {"endpoint": "nope"}),
}
SHAPES = Values(
    ("keep", (2,), (2, 3)), ("nope", (), (0,), (-1,), (2**64,), (2, 0)), (5, ("x",), (1.5,))
)
BY_ENTRANCE = {
    ("import_zarr", "url"): Values(
        (f"memory://{worlds.FILES}/plain",),
        NAMES["location"].extreme,
        NAMES["location"].wrong,
    ),
    ("export", "source"): Values(
        (Made("the repository", lambda w: w.repository), *SESSIONS),
        NAMES["location"].extreme,
        (None, 5, object()),
    ),
    **{
        (call, "repo"): Values(
            (Made("the repository", lambda w: w.repository),),
            NAMES["location"].extreme,
            (None, 5, object()),
        )
        for call in ("clone", "import_zarr", "import_kerchunk", "import_icechunk")
    },
    ("export", "dest"): Values(
        (Made("a new place", lambda w: w.path()),), NAMES["location"].extreme, (None, 5, object())
    ),
    ("import_icechunk", "branches"): Values(
        (None, ["main"]), (["absent"], (), values.TEXT.extreme), (5, [5], [None], "main")
    ),
    ("read_into", "room"): Values(
        tuple(Made("room", lambda _, n=n: memoryview(bytearray(n))) for n in (1, 8)),
        (Made("much room", lambda _: memoryview(bytearray(2**20))), memoryview(b"")),
        (None, 5, "x"),
    ),
    ("delete_files", "names"): Values(
        ([], ["a"], [".zarray", "t/.zattrs"]), ([""], ["..", "/"]), (None, 5, [5])
    ),
    ("clone", "dest"): Values(
        (
            Made("an empty storage", lambda _: MemoryStorage()),
            Made("a new folder", lambda w: w.path()),
        ),
        NAMES["location"].extreme,
        NAMES["location"].wrong,
    ),
    ("clone", "branches"): Values(
        (None, ["main"]), (["absent"], ["main", "absent"], ()), (5, [5], [None], "main")
    ),
    ("import_icechunk", "authorize"): Values(
        (None, {}, {"data": "s3://bucket"}), ({"": "s3://b"}, {"a": "nope://b"}), (5, {5: 5}, ["a"])
    ),
    ("from_fsspec", "fs"): Values(
        (Made("a filesystem", lambda _: fsspec.filesystem("memory")),), (), (None, 5, "x", object())
    ),
    ("from_fsspec", "path"): Values(("/x", None), NAMES["location"].extreme, (5, object())),
    ("from_fsspec", "mode"): values.TEXT.plus("read", "proven", "single-writer"),
    ("from_obstore", "store"): Values(
        (Made("a client", lambda _: obstore.store.S3Store("b")),), (), (None, 5, "x", object())
    ),
    ("from_obstore", "url"): Values((None, "s3://shown"), values.TEXT.extreme, (5, b"x")),
    **{
        (call, "length"): Values((1, 2), values.INT.extreme, ("1", 1.5))
        for call in ("get_version", "get_version_async")
    },
    ("VirtualContainer", "options"): Values(({},), ({"nope": 1},), ({"region": 5},)),
    ("rewrite_chunks", "chunks"): SHAPES,
    ("rewrite_chunks", "shards"): SHAPES.plus(None),
    ("rewrite_chunks", "codecs"): Values(
        (None, {}, {"compressors": None}), ({"compressors": "none"}, {"nope": 1}), (5, "gzip")
    ),
    ("rewrite_chunks", "options"): Values(
        ({}, {"dry_run": True}, {"shards": None}), ({"nope": 1},), ({"branch": 5},)
    ),
    ("rewrite_chunks", "run"): Values((None,), (), (5,)),
    ("RewriteReport", "chunks"): Values((((2, 3), (4, 1)), ((), ())), (), (5,)),
    ("RewriteReport", "shards"): Values(((None, None), ((2,), None), (None, (4,))), (), (5,)),
    ("RewriteReport", "reads_per_chunk"): Values((1.0, 3.5, 0.0), (), (None,)),
    **{
        (call, "scheduler"): Values((None, "threads", "synchronous"), ("nope",), (5,))
        for call in ("write", "to_session")
    },
    ("to_session", "session"): Values(
        (
            *SESSIONS,
            Made("a fork", lambda w: w.writing().fork()),
            Made("a fork of a fork", lambda w: w.writing().fork().fork()),
        ),
        (),
        (None, 5, "main", Made("a store", lambda w: w.writing().store)),
    ),
    ("write_dataset", "options"): Values(
        ({}, {"branch": "main"}), ({"mode": "x"},), ({"nope": 1}, {"branch": 5})
    ),
    ("ingest", "files"): Values((), ((), ["/nowhere.nc"], ["\ud800"], ["a", "a"]), (None, 5, [5])),
    ("ingest", "runner"): Values((None,)),
    ("ingest", "options"): Values(
        ({}, {"branch": "main"}), ({"open": "x"},), ({"nope": 1}, {"branch": 5}, {"virtual": 5})
    ),
    ("ingest", "open"): Values(("netcdf", "zarr"), ("nope",), (5, None)),
    ("ingest", "open_options"): Values((None, {}), ({"nope": 1},), (5, "x")),
    ("ingest", "variables"): Values((None, ["t"]), (["absent"], ()), (5, [5])),
    ("ingest", "encoding"): Values((None, {}), ({"zz": {}}, {"t": {"nope": 1}}), (5, "x")),
    ("ingest", "progress"): Values((None,), (), (5,)),
    ("IngestReport", "added"): Values(((),)),
    ("IngestReport", "replaced"): Values(((),)),
    ("IngestReport", "failed"): Values(((),)),
    ("IngestReport", "snapshot_ids"): Values(((), ("x",))),
    ("IngestReport", "seconds"): Values((0.5, 0.0)),
    ("IngestProgress", "seconds"): Values((0.5, 0.0)),
    ("write", "vds"): NAMES["ds"],
    ("write", "validate"): values.TEXT.plus("auto", "etag", "modified", "none"),
    **{
        (call, "region"): Values((None, {"time": slice(0, 1)}), values.REGIONS, (5, [1], 1.5))
        for call in ("write", "to_session")
    },
    ("write_dataframe", "region"): NAMES["ranges"],
    ("foreach_batch", "region"): NAMES["ranges"],
    **{
        (call, name): values.TEXT.plus(*words)
        for call in ("write", "to_session")
        for name, words in (
            ("on_existing", ("error", "skip", "replace")),
            ("sort", ("refuse", "keep")),
            ("check", (True, False)),
            ("mode", (None, "w", "a", "a-", "r+", "w-")),
        )
    },
    ("initialized_chunks", "region"): NAMES["box"],
    ("create_view", "options"): Values(
        ({}, {"version": "main"}, {"nan": "keep"}),
        ({"version": "\ud800"}, {"nan": "x"}),
        ({"nope": 1}, {"version": 5}, {"ranges": 5}, {"target_rows": "x"}),
    ),
    ("compute_statistics", "paths"): Values(
        (None, ["a"], ("/a", "/v"), ()),
        (["absent"], *([one] for one in values.TEXT.extreme), "a"),
        (5, [None], [5]),
    ),
    ("read_chunks", "coords"): Values(
        (None, [[0]], np.zeros((0, 1), np.int64)),
        ([[-1]], [[2**62]], [0], [], [[0, 0]], [[0], [0]], np.zeros((1, 0), np.int64)),
        (5, "x", [[None]], [["x"]], [[0.5]], object()),
    ),
    ("commit", "rebase"): NAMES["policy"].plus(True, False),
    ("session", "config"): Values((None, {}), values.MAPS, (5, [1])),
    ("of", "state"): values.TEXT.plus("fetched"),
    ("Config", "cache"): CONFIGS["commits"],
    ("Rule", "initialized_chunks"): Values((None, cf.Interval(0, 5)), (), (5, "x", [1])),
    ("Commits", "metadata"): Values(
        ((), (("host", "a"), ("n", 1.5), ("test", True))),
        tuple(((one, "a"),) for one in values.TEXT.extreme),
        (None, 5, "x", [1], (1,), (("a", [1]),), ((1, 2),), {"a": 1}, (("a", object()),)),
    ),
    ("Rule", "metadata_chunks"): Values((None, cf.Interval(0, 5)), (), (5, "x", [1])),
}
XARRAYS = (
    *("mask_and_scale", "decode_times", "concat_characters", "decode_coords", "drop_variables"),
    *("use_cftime", "decode_timedelta"),
)
"""Options of the engine that xarray takes; what it makes of odd ones is its own."""


def choices(entrance: Entrance, parameter: inspect.Parameter) -> Any:
    """The values for a parameter."""
    annotation = str(parameter.annotation)
    if annotation.startswith("Annotated["):  # an option: the type, and what is said of it
        annotation = ast.unparse(ast.parse(annotation, mode="eval").body.slice.elts[0])
    module = (entrance.owner or entrance.call).__module__
    if parameter.name in XARRAYS and entrance.owner is ManifestsBackendEntrypoint:
        return Values((True, False, None))
    if (entrance.name, parameter.name) in BY_ENTRANCE:
        return BY_ENTRANCE[entrance.name, parameter.name]
    table = {}
    if module.startswith("zarr_manifests.config"):
        table = CONFIGS
    elif module.startswith("zarr_manifests.storage"):
        table = STORED
    if parameter.name in table:
        return table[parameter.name]
    if parameter.name in NAMES and annotation not in ("bool", "int", "int | None"):
        return NAMES[parameter.name]
    if annotation.startswith("Literal["):
        words = annotation.removeprefix("Literal").removesuffix(" | None")
        return values.TEXT.plus(*ast.literal_eval(words))
    found = values.BY_ANNOTATION.get(annotation)
    assert found is not None, f"{entrance}: no values for {parameter}; say some in {HERE.name}/"
    return found


def test_every_parameter_of_every_entrance_has_values() -> None:
    for entrance in ENTRANCES:
        for parameter in entrance.parameters:
            assert choices(entrance, parameter).usual or choices(entrance, parameter).extreme
        assert not entrance.bound or entrance.owner.__name__ in OWNERS, f"{entrance} of what?"


def test_nothing_is_left_out_that_is_not_there() -> None:
    assert NOT_CALLED.keys() <= {*map(str, ALL), "Storage"}
    assert UNTRIED.keys() <= set(public.PUBLIC)
    assert len(ENTRANCES) > 80


# --- one call --------------------------------------------------------------------------------


class HangError(Exception):
    """The call took longer than any may."""


@contextmanager
def bounded() -> Iterator[None]:
    """No call hangs, nor takes the memory of the machine."""

    def ring(*_: Any) -> None:
        raise HangError

    before = signal.signal(signal.SIGALRM, ring)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    taken = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * 4096
    resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY_BYTES, limits[1]))
    signal.alarm(HANG_S)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, limits)


def _drawn(data: st.DataObject, entrance: Entrance) -> tuple[dict[str, Any], bool]:
    """Values by parameter, at most two of them unusual; whether all are of the types said."""
    parameters = list(entrance.parameters)
    picks = {p.name: choices(entrance, p) for p in parameters}
    odd = data.draw(st.sets(st.sampled_from(sorted(picks)), max_size=2)) if picks else set()
    named = {p.name: p for p in parameters}
    found, fits = {}, True
    for name, choice in picks.items():
        optional = named[name].default is not inspect.Parameter.empty
        if name in odd and (choice.extreme or choice.wrong):
            pool = (*choice.extreme, *choice.wrong)
            at = data.draw(st.integers(0, len(pool) - 1))
            fits &= at < len(choice.extreme)
            found[name] = pool[at]
        elif not optional or data.draw(st.booleans()):
            found[name] = data.draw(st.sampled_from(choice.usual or choice.extreme))
    return found, fits


ALSO: dict[str, tuple[tuple[type[Exception], ...], str]] = {
    **dict.fromkeys(
        ("write", "to_session"), ((ValueError,), "xarray's own, as its documentation says")
    ),
    "rewrite_chunks": ((ValueError,), "Zarr's own, as its documentation says"),
    "getsize": ((FileNotFoundError,), "Zarr's word for an absent key"),
    **dict.fromkeys(
        ("open_dataset", "open_datatree", "open_groups_as_dict"),
        ((KeyError,), "xarray's own, of arrays without names of dimensions"),
    ),
}
"""What else an entrance may raise, as it says itself."""
EXPIRING = {"expire_snapshots", "garbage_collect", "amend", "reset_branch", "restore"}


def _made(value: Any, world: Any) -> Any:
    return value.make(world) if isinstance(value, Made) else value


def _call(entrance: Entrance, owner: Any, given: dict[str, Any]) -> Any:
    first = [owner] if entrance.bound else []
    for parameter in entrance.parameters:
        if parameter.kind is parameter.VAR_POSITIONAL and parameter.name in given:
            first.append(given.pop(parameter.name))
        if parameter.kind is parameter.VAR_KEYWORD and isinstance(given.get(parameter.name), dict):
            extra = given.pop(parameter.name)
            given |= {str(name): value for name, value in extra.items()}
    return entrance.call(*first, **given)


def attempt(
    entrance: Entrance,
    template: Any,
    folder: Path,
    counter: Iterator[int],
    owner: Any,
    given: dict[str, Any],
    fits: bool,
) -> None:
    """Call it, use what it gives, and look at the repository afterwards."""
    with bounded():
        world = worlds.World(template, folder, counter)
        try:
            _attempt(entrance, world, owner, given, fits)
        finally:
            world.close()


def _attempt(entrance: Entrance, world: Any, owner: Any, given: dict[str, Any], fits: bool) -> None:
    held = _made(owner, world)
    arguments = {name: _made(value, world) for name, value in given.items()}
    session = held if isinstance(held, zm.Session) else None
    also = (
        values.ToldError,
        *ALSO.get(entrance.name, ((), ""))[0],
        *(() if fits else (TypeError, AttributeError)),
    )
    with worlds.only_clear_errors(*also):
        result = _call(entrance, held, arguments)
        if isinstance(result, zm.Session):
            session = world.held(result)
        worlds.used(result)
    world.check([session] if session else [], may_expire=entrance.name in EXPIRING)


@pytest.fixture(scope="module")
def template() -> Any:
    return worlds.Template()


@pytest.fixture(autouse=True)
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory deep in a folder of the test's own; no network, and no Spark."""
    place = tmp_path / "a" / "b" / "c"
    place.mkdir(parents=True)
    monkeypatch.chdir(place)
    bucket = obstore.store.MemoryStore()
    monkeypatch.setattr(Endpoint, "client", lambda *_, **__: bucket)
    monkeypatch.setattr(fsspec_writer, "_SETTLE_S", 0)
    monkeypatch.setattr(spark_session, "find_java", _told)
    monkeypatch.setattr(spark_session, "_builder", _told)
    return tmp_path


def _told(*_: Any) -> Any:
    raise values.ToldError


def _owners(entrance: Entrance) -> tuple[Any, ...]:
    return OWNERS[entrance.owner.__name__] if entrance.bound and entrance.owner else (None,)


@pytest.mark.hypothesis
@pytest.mark.parametrize("entrance", ENTRANCES, ids=str)
def test_unusual_values_together(
    entrance: Entrance, template: Any, apart: Path, request: pytest.FixtureRequest
) -> None:
    """A few parameters at a time have unusual values."""
    counter = itertools.count()

    @settings(
        max_examples=request.config.getoption("--examples") * (1 + len(entrance.parameters)),
        derandomize=True,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def one(data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(_owners(entrance)))
        given, fits = _drawn(data, entrance)
        note(f"{owner}.{entrance.name}({values.SHOWN.repr(given)})")
        attempt(entrance, template, apart, counter, owner, given, fits)

    one()


@pytest.mark.hypothesis
@pytest.mark.parametrize("entrance", ENTRANCES, ids=str)
def test_unusual_values_alone(
    entrance: Entrance, template: Any, apart: Path, request: pytest.FixtureRequest
) -> None:
    """One parameter at a time has an unusual value; with `--examples 50` each of them."""
    counter = itertools.count()
    rest = cycle_of(entrance)
    cases = [
        (name, value, fits)
        for name, choice in ((p.name, choices(entrance, p)) for p in entrance.parameters)
        for fits, some in ((True, choice.extreme), (False, choice.wrong))
        for value in some
    ]
    owners = itertools.cycle(_owners(entrance))
    for name, value, fits in cases[:: max(1, 50 // request.config.getoption("--examples"))]:
        given = next(rest) | {name: value}
        owner = next(owners)
        try:
            attempt(entrance, template, apart, counter, owner, given, fits)
        except BaseException as error:
            error.add_note(f"{owner}.{entrance.name}({values.SHOWN.repr(given)})")
            raise


def cycle_of(entrance: Entrance) -> Iterator[dict[str, Any]]:
    """Usual values of the parameters that need one, and now and then of the others."""
    for number in itertools.count():
        found = {}
        for at, parameter in enumerate(entrance.parameters):
            usual = choices(entrance, parameter).usual or choices(entrance, parameter).extreme
            if parameter.default is parameter.empty or (number + at) % 4 == 0:
                found[parameter.name] = usual[number % len(usual)]
        yield found
