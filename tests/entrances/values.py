"""Values for every parameter of the public entrances: usual ones, and such as nobody expects.

`usual` mean something in the world that is called; `extreme` are of the type that the signature
says; `wrong` are of another. A callable among them is asked for the value, with the world.
"""

from __future__ import annotations

import datetime as dt
import math
import reprlib
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from zarr.abc.store import OffsetByteRequest, RangeByteRequest, SuffixByteRequest
from zarr.core.buffer import cpu, default_buffer_prototype

from zarr_manifests import config as cf
from zarr_manifests.grid import Box
from zarr_manifests.runtime import SYSTEM
from zarr_manifests.storage.memory import MemoryStorage


@dataclass(frozen=True)
class Made:
    """A value that is made for each call."""

    label: str
    make: Callable[[Any], Any]

    def __repr__(self) -> str:
        return self.label


SHOWN = reprlib.Repr(maxstring=60, maxother=60)


@dataclass(frozen=True)
class Values:
    usual: tuple[Any, ...]
    extreme: tuple[Any, ...] = ()
    wrong: tuple[Any, ...] = ()

    def plus(self, *usual: Any, extreme: tuple[Any, ...] = ()) -> Values:
        return Values((*usual, *self.usual), (*self.extreme, *extreme), self.wrong)


class ToldError(Exception):
    """Raised by callables that are handed in; it comes out as it is."""

    def __init__(self, text: str = "told") -> None:
        super().__init__(text)


def _tell(*_: Any) -> Any:
    raise ToldError("a callable that was handed in has failed")


def _nested(depth: int) -> Any:
    found: Any = 0
    for i in range(depth):
        found = {"a": found} if i % 2 else [found]
    return found


def _circle() -> dict[str, Any]:
    found: dict[str, Any] = {}
    found["itself"] = found
    return found


LONG = "x" * 10**6
# --- texts, numbers, times -------------------------------------------------------------------

_TEXTS = (
    "",
    " ",
    "\0",
    "a\0b",
    "\ud800",
    "a\udfffb",
    LONG,
    "\u202egnirts",
    "\x1b[31mred\x1b[0m\x1b]0;title\x07",
    "..",
    "../..",
    ".",
    "./a",
    "/",
    "//",
    "a//b",
    "/a/",
    "a/" * 5000 + "a",
    "\n",
    "a\r\nb",
    "e\u0301\u2028\ufeff",
    "%2e%2e%2f",
    "C:\\a",
    "-",
    "--help",
    "zarr.json",
    "c/0",
    "main",
    "current",
    "000000000001-" + "0" * 24 + "-1",
    "999999999999-" + "f" * 24 + "-" + "9" * 30,
    "{0}{x!r}%s%d",
    "(" * 2000,
    "(a+)+$",
)
_NO_TEXT = (None, b"bytes", b"\xff", 5, 1.5, object(), ["main"], ("a",), {"a": 1})
_INTS = (
    *(-(2**100), -(2**64), -(2**63) - 1, -(2**63), -(2**31), -2, -1, 0, 1, 2),
    *(2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 2**100),
    2**2000,
)
_NO_INT = (
    *(math.nan, math.inf, -math.inf, 1.5, 1e308, True, False, None, "1", "", b"1"),
    *(np.int8(1), np.int64(2), np.uint64(2**64 - 1), np.float64("nan"), np.bool_(True)),
    *(Decimal(2), Decimal("NaN"), Decimal("sNaN"), Fraction(1, 3), 1j, object()),
)
_FLOATS = (
    *(math.nan, math.inf, -math.inf, -0.0, 0.0, 5e-324, 1e-9, 0.5, 1.0, 1e18, 1e300, -1.0),
    *(0, 1, -1, 2**63, 2**64, 2**2000),
)
_NO_FLOAT = (
    *(None, "1", b"1", 1j, Decimal("0.5"), Fraction(1, 3)),
    *(np.float32(0.5), np.float64("nan"), object()),
)
_ODD = dt.timezone(dt.timedelta(hours=23, minutes=59, seconds=59, microseconds=999999))


class _Unsaid(dt.tzinfo):
    def utcoffset(self, _: Any) -> None:
        return None


_TIMES = (
    dt.datetime.min,  # noqa: DTZ901 - as naive as can be
    dt.datetime.max,  # noqa: DTZ901
    dt.datetime.min.replace(tzinfo=dt.UTC),
    dt.datetime.max.replace(tzinfo=dt.UTC),
    dt.datetime.min.replace(tzinfo=_ODD),
    dt.datetime.max.replace(tzinfo=dt.timezone(-_ODD.utcoffset(None))),
    dt.datetime(1969, 12, 31, 23, 59, 59, 999999),  # noqa: DTZ001
    dt.datetime(2026, 3, 29, 2, 30, fold=1),  # noqa: DTZ001
    dt.datetime(2026, 1, 1, tzinfo=_Unsaid()),
    dt.datetime(2026, 1, 1, tzinfo=dt.timezone(dt.timedelta(microseconds=1))),
    pd.Timestamp.max,
    pd.Timestamp.min,
)
_NO_TIME = (pd.NaT, dt.date(2026, 1, 1), np.datetime64("2026"), "2026-01-01", 0, 1.5, object())
_SPANS = (
    *(dt.timedelta.max, dt.timedelta.min, dt.timedelta.resolution, -dt.timedelta.resolution),
    *(dt.timedelta(0), dt.timedelta(milliseconds=1), dt.timedelta(days=-1)),
)
_NO_SPAN = (pd.NaT, np.timedelta64(1, "s"), np.timedelta64("NaT", "s"), "1s", None, object(), [1])

# --- mappings, sequences, arrays -------------------------------------------------------------

MAPS = (
    {},
    {"": ""},
    {"\ud800": 1},
    {"a": "\ud800"},
    {"a\0b": "\x1b[31m"},
    {"a": LONG},
    {LONG: 1},
    {"a": math.nan, "b": math.inf},
    {"a": 2**63, "b": 2**64 - 1},
    {"a": 2**64},
    {"a": -(2**63) - 1},
    {"a": 2**2000},
    {"a": b"\xff" * 10},
    {"a": object()},
    {"a": {1, 2}},
    {"a": dt.datetime.max.replace(tzinfo=dt.UTC)},
    {"a": Decimal(1)},
    {"a": np.arange(3)},
    {"a": np.float32(1.5), "b": np.int64(3), "c": np.bool_(True)},
    {"a": np.float64("nan"), "b": np.datetime64("NaT", "s")},
    {"a": pd.NaT},
    {"a": [_nested(10)]},
    {"a": _nested(600)},
    {"a": _nested(50_000)},
    _circle(),
    {"a": range(3)},
    {"a": (1, 2)},
    {"a": 1j},
    {str(i): i for i in range(10_000)},
    {1: 2},
    {None: 1},
    {b"x": 1},
    {(1, 2): 1},
)
NO_MAP = ("text", 5, [1], [("a", 1)], b"bytes", object(), ("a",), {"a", "b"})
OPTIONS = (
    {"commits": {"mode": "rewrite"}},
    {"commits": None},
    {"commits": {"attempts": 0}},
    {"commits": {"attempts": 2**64}},
    {"compaction": {"max-delta-count": -1}},
    {"compaction": {"max-delta-count": 1}},
    {"compaction": {"max-delta-count": math.nan}},
    {"inline-chunk-bytes": 2**63},
    {"inline-chunk-bytes": 0},
    {"pack-chunk-bytes": 0},
    {"pack-bytes": 1},
    {"spill-refs": 1},
    {"spill-refs": 0},
    {"compaction": {"mode": "manual", "size-ratio": math.nan}},
    {"compaction": {"size-ratio": 0.0, "fan-in": 2, "min-delta-count": 1}},
    {"snapshots": {"keep-last": 0}},
    {"snapshots": {"keep-last": 1, "max-age": "0s"}},
    {"snapshots": {"max-age": dt.timedelta.max}},
    {"snapshots": {"max-age": "9" * 400 + "d"}},
    {"cache": {"max-size": 0, "expire-ms": 0}},
    {"cache": {"max-size": -1}},
    {"chunk-manifests": {"sets": {"a": {"overflow-to": "a"}}}},
    {"chunk-manifests": {"splitting": {"\ud800": {"axis": 0}}}},
    {"chunk-manifests": {"rules": [{"path": "(" * 500, "target": "default"}]}},
    {"chunk-manifests": {"rules": [{"path": "\ud800", "target": "default"}]}},
    {"chunk-manifests": {"preload": {"arrays": ["(a+)+$"], "branches": ["\ud800"]}}},
    {"unknown": 1},
)
_ROWS = (
    [],
    [[]],
    [[0]],
    [[0], [0]],
    [[-1], [1]],
    [[2**40], [1]],
    [[2**63], [1]],
    [[2**70], [1]],
    [[0, 0], [1, 1]],
    [0, 4],
    [4, 4],
    [-1, 4],
    [2**62, 4],
    [2**63 - 1, 1],
    [2**63, 2**64],
    [2**70, 0],
    [0.5, 1.5],
    [math.nan, math.inf],
    [True, False],
    np.zeros((0, 1), "i8"),
    np.zeros((2, 1), "u1"),
    np.full((2, 1), 2**64 - 1, "u8"),
    np.array([1, 2], "f2"),
    np.array(["NaT", "2026"], "M8[ms]"),
    np.array(["1677-09-22", "2262-04-11"], "M8[ns]"),
    np.array([None, 1], object),
    np.ma.masked_array([1, 2], [True, False]),
)
_NO_ROWS = ("x", "12", None, object(), {"a": 1}, 5, b"ab", [["a"], ["b"]], [[1], [1, 2]], {1, 2})
_BOXES = (
    (),
    (slice(None),),
    (slice(None), slice(None)),
    (slice(0, 2),),
    (slice(2, 0),),
    (slice(-1, 5),),
    (slice(0, 2**70),),
    (slice(0, 4, 2),),
    (slice(None, None, -1),),
    ((0, 2),),
    ((-1, 2),),
    ((2**63, 2**64),),
    ((0, 2**62),),
    ((0,),),
    ((0, 1, 2),),
    (slice(0, 1),) * 1000,
    Box((0,), (2,)),
    Box((0, 0), (1, 1)),
    Box((0,), (2**61,)),
    Box((), ()),
)
_NO_BOX = (
    *("x", 5, 1.5, object(), (slice("a", "b"),), (slice(0, 1.5),), ((math.nan, 1),)),
    *(((True, 1),), (None,), ("ab",), {0: 1}, (slice(np.int64(0), np.uint8(2)),), (..., 1), (0,)),
)
BYTES = (
    b"",
    b"\0",
    b"\xff" * 3000,
    bytes(300_000),
    b"{}",
    b"null",
    b"[" * 100_000,
    b'{"a":' * 50_000,
    b'{"zarr_format":3,"node_type":"group"}',
    b'{"zarr_format":3,"node_type":"group","attributes":{"a":NaN,"b":"\\ud800","c":1e999}}',
    b'{"zarr_format":2}',
    b'{"zarr_format":' + b"9" * 5000 + b"}",
    b'{"zarr_format":3,"node_type":"array"}',
    *(
        b'{"zarr_format":3,"node_type":"array","shape":%s,"data_type":"uint8","chunk_grid":'
        b'{"name":"regular","configuration":{"chunk_shape":%s}},"chunk_key_encoding":{"name":'
        b'"default"},"fill_value":0,"codecs":[{"name":"bytes"}],"attributes":{}}' % (shape, chunks)
        for shape, chunks in (
            (b"[8]", b"[2]"),
            (b"[]", b"[]"),
            (b"[-1]", b"[2]"),
            (b"[8]", b"[0]"),
            (b"[8,8]", b"[2]"),
            (b"[%d]" % 2**70, b"[1]"),
            (b"[8]", b"[%d]" % 2**70),
            (b"[%d,%d,%d]" % (2**31, 2**31, 2**31), b"[1,1,1]"),
            (b"[1e999]", b"[1]"),
            (b"[1.5]", b"[true]"),
            (b"[" + b"1," * 5000 + b"1]", b"[" + b"1," * 5000 + b"1]"),
        )
    ),
)


def _ds(**variables: Any) -> Made:
    return Made(
        f"Dataset({', '.join(variables)})",
        lambda _: xr.Dataset(variables),
    )


_DATASETS = (
    Made("Dataset()", lambda _: xr.Dataset()),
    _ds(t=(("time", "x"), np.full((1, 3), np.nan))),
    _ds(t=(("time", "x"), np.zeros((0, 3), "f4"))),
    _ds(t=(("time", "x"), np.full((1, 3), 1e300))),
    _ds(t=(("time",), np.arange(2))),
    _ds(t=((), 2**63 - 1)),
    _ds(n=(("time",), np.array(["NaT", "2262-04-11", "1677-09-22"], "M8[ns]"))),
    _ds(n=(("time",), np.array(["NaT", 2**62], "m8[ns]"))),
    _ds(n=(("y",), np.array([1 + 2j, np.nan]))),
    _ds(n=(("y",), np.array([1, np.inf], "f2"))),
    _ds(n=(("y",), np.array([2**64 - 1], "u8"))),
    _ds(n=(("y",), np.array(["a\0b", "x" * 1000]))),
    _ds(n=(("y",), np.array([b"\xff\0", b""]))),
    _ds(n=(("y",), np.array([object(), {}], object))),
    _ds(n=(("y",), np.array([(1, 2.0)], [("a", "i4"), ("b", "f8")]))),
    _ds(n=(("y",), np.array([True, False]))),
    _ds(n=(("y",), [1], {"units": "days since 0000-00-00", "scale_factor": 0})),
    _ds(n=(("y",), [1], {"a": object()})),
    _ds(n=(("y",), [1], {"a": "\ud800", "\ud801": 1})),
    _ds(n=(("y",), [1], {"a": math.nan, "b": 2**70, "c": np.float32(1)})),
    _ds(n=(("y",), [1], {"a": _nested(50_000)})),
    Made("Dataset(circle)", lambda _: xr.Dataset({"n": ("y", [1], _circle())})),
    *(
        Made(f"Dataset(named {name[:20]!r})", lambda _, name=name: xr.Dataset({name: ("y", [1])}))
        for name in ("", ".", "..", "a/b", "/", "zarr.json", "\ud800", "a\0b", "x" * 5000)
    ),
    *(
        Made(f"Dataset(along {name!r})", lambda _, name=name: xr.Dataset({"n": ((name,), [1])}))
        for name in ("", "a/b", "\ud800", 5, (1, 2), None)
    ),
    Made("Dataset(named 5)", lambda _: xr.Dataset({5: ("y", [1])})),
    Made("Dataset(named None)", lambda _: xr.Dataset({None: ("y", [1])})),
)
_TREES = (
    Made("DataArray()", lambda _: xr.DataArray(1)),
    Made("DataArray(named time)", lambda _: xr.DataArray([4], {"time": [4]}, name="time")),
    Made("DataArray(named 5)", lambda _: xr.DataArray([1], dims="y", name=5)),
    Made("DataTree()", lambda _: xr.DataTree()),
    Made("DataTree(empty nodes)", lambda _: xr.DataTree.from_dict({"/a/b": None, "/g": None})),
    Made("DataTree(over an array)", lambda _: xr.DataTree.from_dict({"/a": _later()})),
    *(
        Made(f"DataTree({name!r})", lambda _, name=name: xr.DataTree(children={name: _node()}))
        for name in ("", ".", "..", "zarr.json", "\ud800", "a\0b")
    ),
)
_ENCODINGS = (
    *({"t": {}}, {"zz": {}}, {"t": None}, {"t": 5}, {None: {}}, {"t": {"dtype": "int16"}}),
    *({"t": {"dtype": "nope"}}, {"t": {"chunks": (0, 0)}}, {"t": {"chunks": (2**70, 1)}}),
    *({"t": {"chunks": "x"}}, {"t": {"chunks": ()}}, {"t": {"scale_factor": 0.0}}),
    *({"t": {"scale_factor": math.nan, "dtype": "i2"}}, {"t": {"_FillValue": object()}}),
    *({"t": {"compressors": "x"}}, {"t": {"unknown": 1}}, {"t": {1: 2}}, {"\ud800": {}}),
)
REGIONS = (
    *("auto", {}, {"time": slice(0, 1)}, {"time": slice(0, 2**70)}, {"time": slice(-9, 1)}),
    *({"time": slice(0, 1, 2)}, {"time": "auto"}, {"nope": slice(0, 1)}, {"time": slice(3, 1)}),
    *("nope", "", {"time": None}, {"time": 5}, {1: slice(0, 1)}, {"time": slice(None)}),
)
_REFERENCES = (
    {},
    {"version": 1},
    {"version": 1, "refs": {}},
    {"version": 1, "refs": None},
    {"version": 2**64, "refs": {}},
    {"version": 1, "refs": {"..": "x", "a/../b": "x", "": "x", "/": "x"}},
    {"version": 1, "refs": {"\ud800": "x"}},
    {"version": 1, "refs": {"k/.zgroup": "\ud800"}},
    {"version": 1, "refs": {"k/.zgroup": "[" * 100_000}},
    {"version": 1, "refs": {"k/.zgroup": "base64:%%%"}},
    {"version": 1, "refs": {".zgroup": {"zarr_format": math.nan}}},
    {"version": 1, "refs": {"x/0": ["memory://entrance-files/one", -1, 2**64]}},
    {"version": 1, "refs": {"x/0": ["memory://entrance-files/one", 2**62, 2**62]}},
    {"version": 1, "refs": {"x/0": ["\ud800"]}},
    {"version": 1, "refs": {"x/0": []}},
    {"version": 1, "refs": {"x/0": [1, 2, 3, 4]}},
    {"version": 1, "refs": {1: 2, None: 3}},
    {"version": 1, "templates": {"u": "{{u}}"}, "refs": {"x/0": ["{{u}}/a"]}},
    {"version": 1, "templates": {"u": "\ud800"}, "refs": {"x/0": ["{{u(a=1)}}"]}},
    {"version": 1, "gen": [{"key": "{{i}}", "dimensions": {"i": {"stop": 2**60}}}], "refs": {}},
    {"version": 1, "gen": 5, "refs": {}},
    _circle(),
)

# --- what is made for a call -----------------------------------------------------------------

_IDS = (
    Made("the head's id", lambda w: w.template.ids[0]),
    Made("an older id", lambda w: w.template.ids[2]),
    Made("the first id", lambda w: w.template.ids[-1]),
    Made("dev's id", lambda w: w.repository.list_branches()["dev"]),
)
_HERE = (
    Made("the storage", lambda w: w.storage),
    Made("the repository", lambda w: w.repository),
)
_PLACES = (
    *("", " ", "\0", "a\0b", "\ud800", LONG, "..", ".", "/", "//", "~", "/dev/null", "a/" * 3000),
    *("memory://", "memory://..", "memory://a b", "memory://\ud800", "memory://" + LONG),
    *("memory://nobody-made-this", "file://", "file://host/x", "file:///", "nope://x", "://", ":"),
    *("s3://", "http://", "https://user:secret@host/", "s3:/x", "file:x", "\x1b[31m", "a\nb"),
    *(Path(), Path("memory://x"), Path("/"), Path("a" * 300)),
)
_NO_PLACE = (None, 5, 1.5, b"bytes", b"\xff", object(), ["a"], {"a": 1})

TEXT = Values((), _TEXTS, _NO_TEXT)
NAME = TEXT.plus("new", "main", "dev", "v1")
BRANCH = TEXT.plus("main", "main", "main", "dev")
PATH = TEXT.plus("a", "/a", "t", "g", "g/big", "v", "note.txt", "time", "new")
INT = Values((1, 2, 3), _INTS, _NO_INT)
FLOAT = Values((0.5, 1.0), _FLOATS, _NO_FLOAT)
BOOL = Values((False, True), (), (None, 0, 1, "", "yes", np.bool_(True), math.nan))
SPAN = Values((dt.timedelta(hours=1), dt.timedelta(days=30)), _SPANS, _NO_SPAN)
MAP = Values(({"a": 1}, {"run": "7", "list": [1, "b", None]}), MAPS, NO_MAP)
CONFIG = Values((None, cf.Config()), (*OPTIONS, *MAPS), NO_MAP)
ROWS = Values(([[0], [1]], [0, 4], [0, 0], [4, 4]), _ROWS, _NO_ROWS)
PLACE = Values(
    (
        Made("the storage", lambda w: w.storage),
        Made("an empty storage", lambda _: MemoryStorage()),
        Made("a new folder", lambda w: w.path()),
        Made("a new path", lambda w: Path(w.path())),
    ),
    _PLACES,
    _NO_PLACE,
)
CALLABLE = Values((Made("a callable", lambda _: lambda *_: None),), (_tell,), ())
KEY = TEXT.plus(
    *("a/c/0", "a/c/3", "zarr.json", "a/zarr.json", "note.txt", "new/zarr.json", "new/.zarray"),
    *("new/.zattrs", "new/c/0", "g/big/c/1"),
)
_KEYS = tuple(zip(KEY.usual, (None, RangeByteRequest(0, 1)) * 5, strict=True))

BY_ANNOTATION = {
    "str": TEXT,
    "str | None": TEXT,
    "str | bytes": TEXT,
    "bool": BOOL,
    "int": INT,
    "int | None": INT,
    "float": FLOAT,
    "float | None": FLOAT,
    "timedelta": SPAN,
    "timedelta | None": SPAN,
    "int | timedelta | None": Values((1, 3, dt.timedelta(days=30)), (*_INTS, *_SPANS), ("1s", [1])),
    "bytes": Values((b"x",), BYTES, ("text", None, 5, object())),
    "datetime": Values((dt.datetime(2026, 1, 1, tzinfo=dt.UTC),), _TIMES, _NO_TIME),
    "Mapping[str, Any]": MAP,
    "Mapping[str, Any] | None": MAP,
    "Config | Mapping[str, Any]": CONFIG,
    "Config | Mapping[str, Any] | None": CONFIG,
    "ArrayLike": ROWS,
    "ArrayLike | None": ROWS,
    "Runtime": Values((SYSTEM,)),
}
BY_NAME = {
    "branch": BRANCH,
    "tag": NAME.plus("v1"),
    "name": NAME,
    "snapshot_id": TEXT.plus(*_IDS),
    "start": TEXT.plus(*_IDS, "main", "v1"),
    "end": TEXT.plus(*_IDS, "main", "v1"),
    "path": PATH,
    "array_path": PATH.plus("a", "v"),
    "old": PATH,
    "new": PATH.plus("h", "g/h"),
    "group": PATH.plus("/", "", "g"),
    "message": TEXT.plus("a message"),
    "txn": Values(
        (None, ("app", 1), ["app", 2]),
        (*((one, 1) for one in _TEXTS), *(("app", one) for one in _INTS)),
        (5, "ab", b"ab", (), ("app",), ("app", None), (None, 1), ([], 1), {"a": 1, "b": 2}),
    ),
    "dim": TEXT.plus("time", "x"),
    "append_dim": TEXT.plus("time", "x"),
    "location": PLACE,
    "url": PLACE,
    "key": KEY,
    "prefix": KEY.plus("", "a", "a/c/"),
    "after": KEY.plus("", "a"),
    "mode": TEXT.plus("minor", "major", "full", "net", "log"),
    "older_than": BY_ANNOTATION["datetime"],
    "lease": Values((dt.timedelta(seconds=9), 9.0), (*_SPANS, *_FLOATS), _NO_SPAN[:-3]),
    "timeout": Values((dt.timedelta(seconds=9), 9.0), (*_SPANS, *_FLOATS), _NO_SPAN),
    "box": Values((None, ((0, 2),), (slice(0, 2),)), _BOXES, _NO_BOX),
    "cells": Values((None, ((0, 2),), (slice(0, 2),)), _BOXES, _NO_BOX),
    "offset_in_chunks": Values(
        ((1,), (-1,), [0]),
        ((), (1, 1), (2**63,), (2**70,), (-(2**63),), (2**2000,), (0,) * 1000),
        (5, "1", None, (1.5,), ("a",), (math.nan,), (np.int64(1),), (True,), {1: 1}, object()),
    ),
    "places": Values(
        ({(0,): (1,), (1,): (0,)}, {(0,): None}, lambda c: c, np.array([[0, 1], [1, 0]])),
        (
            *({}, {(0,): (2**70,)}, {(0,): (-5,)}, {(2**70,): (0,)}, {(0, 0): (1,)}, {(): ()}),
            *({(0,): (1,)}, lambda c: (2**64,), lambda c: None, lambda c: (0,), _tell),
            *(np.zeros((0, 2), "i8"), np.array([[0, -1]]), np.array([[2**64 - 1, 0]], "u8")),
            *(np.array([[0.5, 1]]), np.zeros((2, 3), "i8"), np.array([["a", "b"]])),
        ),
        (None, 5, "x", {0: 1}, {(0,): 1}, {(0,): "a"}, {(0.5,): (1,)}, lambda: 1, lambda c: "x"),
    ),
    "policy": Values(
        ("fail", "ours", "theirs", lambda _: "ours"), (_tell, "", "nope"), (None, 5, [], lambda: 1)
    ),
    "run": Values((None, map), (), (5, "x")),
    "progress": Values((None, lambda *_: None), (_tell,), (5, "x")),
    "forks": Values(
        (
            Made("a fork", lambda w: w.writing().fork()),
            Made("a store", lambda w: w.writing().store),
            Made("a read-only store", lambda w: w.repository.readonly_session().store),
        ),
        (),
        (None, 5, "x", object(), [1]),
    ),
    "value": Values(
        (Made("a buffer", lambda _: cpu.Buffer.from_bytes(b"ab")),),
        tuple(
            Made(
                f"buffer {data[:60]!r} ({len(data)})",
                lambda _, data=data: cpu.Buffer.from_bytes(data),
            )
            for data in BYTES
        ),
        (b"bytes", None, "x", 5, object()),
    ),
    "prototype": Values((None, default_buffer_prototype())),
    "key_ranges": Values(([], _KEYS), ([(name, None) for name in _TEXTS],), (5, None, [5])),
    "byte_range": Values(
        (None, RangeByteRequest(0, 1), OffsetByteRequest(1), SuffixByteRequest(1)),
        (
            *(RangeByteRequest(5, 1), RangeByteRequest(-1, 1), RangeByteRequest(0, 2**70)),
            *(RangeByteRequest(2**70, 2**71), RangeByteRequest(-5, -1), OffsetByteRequest(-1)),
            *(OffsetByteRequest(2**70), SuffixByteRequest(-1), SuffixByteRequest(2**70)),
            *(SuffixByteRequest(0), RangeByteRequest(1, 1)),
        ),
        (5, (0, 1), "x", RangeByteRequest(0.5, 1), RangeByteRequest("a", "b"), object()),
    ),
    "locations": Values(
        (["virtual://raw/one"], [f"memory://{'entrance-files'}/one", "virtual://raw/one"]),
        tuple([one] for one in (*_TEXTS, "virtual://", "virtual://raw/", "virtual://raw/../x")),
        ("virtual://raw/one", None, 5, [None], [5], [b"x"], object()),
    ),
    "etags": Values((None, ["a"], [None]), tuple([one] for one in _TEXTS), (5, [5], "a", [b"x"])),
    "unchanged_since": Values(
        (None, [5], [-1]), ([-2], [2**63 - 1], [2**70]), (5, ["x"], [None], [1.5], [5, 5])
    ),
    "virtual_containers": Values(
        (None, {"raw": "memory://entrance-files"}),
        (
            *({one: "memory://x"} for one in _TEXTS),
            *({"raw": one} for one in _PLACES),
        ),
        (5, "x", [1], {"raw": 5}, {5: "memory://x"}, {"raw": None}),
    ),
    "cache": Values(
        (None, {}, cf.CacheOptions()),
        (
            *({"max-size": n} for n in _INTS),
            *({"directory": one} for one in ("", "\0", "\ud800", "cache", "/dev/null")),
            *({"directory": "cache", "directory-bytes": n} for n in (0, 1, 2**70)),
            *({"chunk-bytes": n} for n in (-1, 0, 2**70, math.nan)),
            *MAPS,
        ),
        NO_MAP,
    ),
    "authorize": Values(((), []), tuple([one] for one in _TEXTS), (5, "raw", [None], [5])).plus(
        True, False
    ),
    "storage_options": Values((None, {}), MAPS, NO_MAP),
    "credentials": Values((None, dict), (), ("text", 5, {"token": "x"}, [1], object())),
    "references": Values(
        (
            {
                "version": 1,
                "refs": {
                    "k/.zarray": '{"zarr_format":2,"shape":[4],"chunks":[4],"dtype":"|u1",'
                    '"compressor":null,"fill_value":0,"order":"C","filters":null}',
                    "k/0": ["memory://entrance-files/one", 0, 4],
                },
            },
        ),
        (*_REFERENCES, *MAPS),
        _NO_PLACE[:-1],
    ),
    "ds": Values(
        (
            Made("the next times", lambda _: _later()),
            Made("a new variable", lambda _: xr.Dataset({"n": ("y", np.arange(3))})),
            Made("an array", lambda _: _later().t),
            Made("a tree", lambda _: xr.DataTree.from_dict({"/": _later(), "/new": _later()})),
        ),
        (*_DATASETS, *_TREES),
        (None, 5, {"t": [1]}, np.arange(3)),
    ),
    "encoding": Values((None, {}), _ENCODINGS, (5, "x", [1], [("t", {})])),
    "filename_or_obj": PLACE.plus(*_HERE),
    "spark": Values((Made("a stand-in for Spark", lambda _: _Spark()),)),
    "df": Values((Made("a stand-in for rows", lambda _: _Rows()),)),
    "dims": Values(
        (["time", "x"], ("x", "time")),
        (*([one] for one in _TEXTS), (), ["x", "x"], ["nope"]),
        (5, "time", [5], None),
    ),
    "tolerance": Values(
        (None, {"x": 0.5}), ({"nope": 1}, *({"x": n} for n in _FLOATS)), (5, "x", [1], {"x": "y"})
    ),
    "template": Values((None, Made("a dataset", lambda _: _later())), _DATASETS, (5, "x", [1])),
    "on_report": Values((None, lambda *_: None), (_tell,), (5, "x")),
    "variables": Values(
        ("t", ["t"], None),
        (*_TEXTS, [], [""], ["t", "t"], ["t", "a"], ["\ud800"], [LONG], ["x"] * 10_000),
        (5, [5], [None], {"t": 1}, object(), b"t"),
    ),
    "ranges": Values(
        (None, {"time": (0, 2)}),
        (
            *(
                {"time": (a, b)}
                for a in (None, math.nan, -(2**70), "x", "\ud800")
                for b in (None, 3)
            ),
            *({"time": pair} for pair in (("2026", "2027"), (math.inf, -math.inf), (3, 1))),
            *({"nope": (0, 1)}, {"": (0, 1)}, {"x": (2**63, 2**64)}, {"x": (0.5, 1.5)}),
        ),
        (5, "x", [1], {"time": 5}, {"time": ()}, {"time": (1, 2, 3)}, {5: (0, 1)}, {"time": "ab"}),
    ),
    "where": Values(
        (None, "time >= 0", [("time", "<", 5)]),
        (
            *("", " ", "time", "time >", "nope = 1", "time = 'x'", "time > 1e999", "\x00"),
            *("x OR y", "`a", "time IN ()", "time BETWEEN 3 AND 1", f"time < {2**70}"),
            *(
                "time = '9999999-01'",
                "time IS NULL",
                LONG,
                "\ud800 = 1",
                "time = 1 AND " * 1000 + "time = 1",
            ),
            *([], {}, [("time", "=", math.nan)], [("time", "~", 1)], [("time", "=", 2**70)]),
        ),
        (5, object(), [None], [("time",)], [("time", "=", object())], {5: 1}, b"time > 1"),
    ),
    "base": Values((None,)),
}
"""By the name of a parameter, wherever it is."""


def _later() -> xr.Dataset:
    values = np.ones((1, 3), "f4")
    return xr.Dataset({"t": (("time", "x"), values)}, {"time": [4]})


def _node() -> xr.DataTree:
    return xr.DataTree(xr.Dataset({"n": ("y", [1])}))


class _Rows:
    """As much of a DataFrame as is asked before anything is computed."""

    columns = ("time", "x", "t")

    @property
    def schema(self) -> Any:
        raise ToldError("the arguments are in order, and Spark would begin")

    sparkSession = schema  # noqa: N815 - as Spark names it


class _Spark:
    """As much of a Spark session as is asked before anything is read."""

    class conf:  # noqa: N801 - as Spark names it
        @staticmethod
        def get(_: str) -> str:
            return "false"

    class sparkContext:  # noqa: N801 - as Spark names it
        defaultParallelism = 2  # noqa: N815 - as Spark names it

    class dataSource:  # noqa: N801 - as Spark names it
        @staticmethod
        def register(_: type) -> None:
            raise ToldError("Spark would take the data source")

    def createDataFrame(self, *_: Any) -> str:
        return "no rows"

    def range(self, *_: Any) -> Any:
        raise ToldError("the arguments are in order, and Spark would begin")
