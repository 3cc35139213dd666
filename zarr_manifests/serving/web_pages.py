"""The pages: history, trees, arrays and differences as HTML that fetches nothing from elsewhere.

Names, messages and attributes are anybody's. They reach HTML through templates that escape every
value, and URLs through `quote`. Links name snapshots by id, so that what they show never changes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any, Final
from urllib.parse import quote, unquote

import anyio
import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route
from xarray.backends.zarr import FillValueCoder

from zarr_manifests.display import attributes_of, fields_of, hierarchy
from zarr_manifests.engine.chunk_statistics import chunk_map
from zarr_manifests.engine.overlay import SessionView
from zarr_manifests.engine.totals import totals_of
from zarr_manifests.errors import ManifestsError, NotFoundError, SnapshotExpiredError, plain_text
from zarr_manifests.format.manifest import Node
from zarr_manifests.grid import IndexArray
from zarr_manifests.keys import ArrayMeta, absolute, check_inside, split
from zarr_manifests.picturing import ChunkMap, as_table
from zarr_manifests.picturing.graph import graph_shapes
from zarr_manifests.reports import Diff, SnapshotInfo, moved_tops
from zarr_manifests.repository import graph_of
from zarr_manifests.serving.answers import Answers, status_of, text_of, version_of
from zarr_manifests.texts import bytes_text, count_text, time_text, written_text
from zarr_manifests.versions import refs_by_snapshot

_AT_ONCE: Final = 4
"""Pages made at a time: each may hold the node table of a version, and its changed chunks."""
_ROWS: Final = 60
_MOST_ROWS: Final = 1000
_NODES: Final = 1000
_LISTED: Final = 200
_VALUE: Final = 2000
_MOST_CHANGED: Final = 2_000_000
"""Changed chunks of a commit; of more, the page does not say which they are."""
_TITLES: Final = {404: "Not found", 410: "No longer here", 400: "Not understood"}
_SIDE: Final = 48
_LONG_SIDE: Final = 384  # four times as many cells in a row, which fill 26 lines


class Pages:
    """The pages of a repository.

    Parameters
    ----------
    answers : Answers
        Opens snapshots, and has the threads.
    """

    def __init__(self, answers: Answers) -> None:
        self._answers, self._repo = answers, answers.repo
        self._few = anyio.CapacityLimiter(_AT_ONCE)
        self._templates = Environment(
            loader=PackageLoader("zarr_manifests.serving"),
            autoescape=True,
            finalize=_shown,
            lstrip_blocks=True,
            trim_blocks=True,
            undefined=StrictUndefined,
        )
        self._templates.filters |= {
            "amount": lambda n: f"{n:,}",
            "bytes": bytes_text,
            "count": count_text,
            "time": time_text,
            "written": written_text,
        }

    def routes(self) -> list[Route]:
        """The routes."""
        views = {
            "/": self._home,
            "/compare": self._compare,
            "/tree/{version}": self._tree,
            "/array/{version}/{path:path}": self._array,
            "/diff/{old}/{new}": self._diff,
            "/diff/{old}/{new}/{path:path}": self._array_diff,
        }
        return [Route(path, self._endpoint(view)) for path, view in views.items()]

    def _endpoint(
        self, view: Callable[[Request], Response]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            try:
                async with self._few:
                    return await self._answers.run(partial(view, request))
            except ManifestsError as error:
                status = status_of(error)
                told = {"title": _TITLES.get(status, "Something is wrong"), "text": text_of(error)}
                return self._render(request, "error.html", status, **told)

        return endpoint

    def _render(
        self, request: Request, template: str, status: int = 200, **values: Any
    ) -> Response:
        url = self._repo.storage.url
        text = self._templates.get_template(template).render(
            link=partial(_link, request),
            repository=url,
            name=unquote(url.rstrip("/").rpartition("/")[2]) or url,
            host=f"{request.url.scheme}://{request.url.netloc}",
            **values,
        )
        return HTMLResponse(text, status, {"Cache-Control": "no-cache"})

    def _asked(self, request: Request, *names: str) -> list[SessionView]:
        return [self._answers.opened(version_of(request.path_params[name])) for name in names]

    def _commit(self, contents: SessionView) -> dict[str, Any]:
        """What the head of a page says of a snapshot."""
        info = next(self._repo.ancestry(contents.view.snapshot_id, limit=1))
        refs = refs_by_snapshot(self._repo.list_branches(), self._repo.list_tags())
        return {"info": info, "refs": refs.get(info.id, [])[:_LISTED]}

    def _written_by(self, info: SnapshotInfo) -> Diff | None:
        """What a commit changed; None if that is too much, or what came before has expired."""
        changed = info.written.get("refs-set", 0) + info.written.get("refs-unset", 0)
        if info.parent_id is None or changed > _MOST_CHANGED:
            return None
        try:
            return self._repo.diff(info.parent_id, info.id, symmetric=False)
        except SnapshotExpiredError:
            return None

    def _diff_of(self, old: SessionView, new: SessionView) -> Diff:
        return self._repo.diff(old.view.snapshot_id, new.view.snapshot_id, symmetric=False)

    # --- history -----------------------------------------------------------------------------

    def _home(self, request: Request) -> Response:
        wanted = _number(request.query_params.get("rows"), _ROWS, _MOST_ROWS)
        rows = graph_of(self._repo, rows=wanted)
        is_cut = rows and rows[-1].below
        return self._render(
            request,
            "home.html",
            branches=list(islice(self._repo.list_branches().items(), _LISTED)),
            tags=list(islice(self._repo.list_tags().items(), _LISTED)),
            graph=graph_shapes(rows),
            rows=rows,
            more=min(4 * wanted, _MOST_ROWS) if is_cut and wanted < _MOST_ROWS else None,
        )

    def _compare(self, request: Request) -> Response:
        names = (request.query_params.get(name, "main") for name in ("old", "new"))
        ids = [self._answers.opened(version_of(name)).view.snapshot_id for name in names]
        return RedirectResponse(_link(request, "diff", *ids), 303)

    # --- trees -------------------------------------------------------------------------------

    def _tree(self, request: Request) -> Response:
        (contents,) = self._asked(request, "version")
        group = request.query_params.get("group", "").strip("/")
        nodes = contents.guarded(contents.nodes)
        if group and group not in nodes:
            raise NotFoundError(f"there is no group {absolute(group)}")
        below = {p: n for p, n in nodes.items() if not group or f"{p}/".startswith(f"{group}/")}
        rows = list(islice(hierarchy(below), _NODES + 1))
        usage = totals_of(contents.view)
        return self._render(
            request,
            "tree.html",
            **self._commit(contents),
            group=group,
            rows=rows[:_NODES],
            is_cut=len(rows) > _NODES,
            sizes={array.path.strip("/"): array for array in usage.arrays},
            most=max((array.total.nbytes for array in usage.arrays), default=0),
            usage=usage,
        )

    # --- arrays ------------------------------------------------------------------------------

    def _array(self, request: Request) -> Response:
        (contents,) = self._asked(request, "version")
        array = _ShownArray.at(contents, request.path_params["path"])
        commit = self._commit(contents)
        changed = array.changed(self._written_by(commit["info"]))
        found = array.chunk_map()
        table = as_table(found, changed, array.meta.chunk_shape)
        return self._render(
            request,
            "array.html",
            **commit,
            path=array.node.path,
            facts=_facts(array),
            attributes=_attributes(array),
            documents=[(key, _text(value)) for key, value in array.node.documents.items()],
            stored=(int(found.chunks.sum()), int(found.nbytes.sum())),
            whole=array.meta.grid.size,
            changed=None if changed is None else len(changed),
            table=table,
            look=_look(request, {"": array}, array.start(changed, table)),
        )

    # --- differences -------------------------------------------------------------------------

    def _diff(self, request: Request) -> Response:
        old, new = self._asked(request, "old", "new")
        diff = self._diff_of(old, new)
        nodes = new.guarded(new.nodes)
        lists = ("New", diff.created), ("New metadata", diff.updated), ("Gone", diff.deleted)
        return self._render(
            request,
            "diff.html",
            old=self._commit(old),
            new=self._commit(new),
            lists=[(what, paths[:_LISTED], len(paths)) for what, paths in lists if paths],
            moved=list(islice(moved_tops(diff.moved).items(), _LISTED)),
            chunks=[(path, len(at)) for path, at in islice(diff.chunks.items(), _LISTED)],
            truncated=list(islice(diff.truncated.items(), _LISTED)),
            arrays={absolute(path) for path, node in nodes.items() if node.array},
        )

    def _array_diff(self, request: Request) -> Response:
        old, new = self._asked(request, "old", "new")
        array = _ShownArray.at(new, request.path_params["path"])
        changed = array.changed(self._diff_of(old, new))
        table = as_table(array.chunk_map(), changed, array.meta.chunk_shape)
        versions = {"New": array}
        before = old.guarded(partial(old.node, array.node.path))
        meta = None if before is None else before.array
        if before is not None and meta is not None and len(meta.shape) == len(array.meta.shape):
            versions = {"Old": _ShownArray(old, before, meta), "New": array}
        return self._render(
            request,
            "array_diff.html",
            old=self._commit(old),
            new=self._commit(new),
            path=array.node.path,
            is_new=len(versions) == 1,
            changed=0 if changed is None else len(changed),
            whole=array.meta.grid.size,
            table=table,
            look=_look(request, versions, array.start(changed, table)),
        )


def _shown(value: object) -> object:
    """What a template puts out: control characters written out, so that nothing is disguised."""
    if isinstance(value, Markup) or not isinstance(value, str):
        return value
    return plain_text(value, lines=True)


def _link(request: Request, *parts: object) -> str:
    """A path on this server; names of arrays keep their slashes."""
    names = [str(part) for part in parts]  # escaped dots would climb, too
    path = "/".join(quote(name and check_inside(name), safe="/~") for name in names)
    return f"{request.scope.get('root_path', '')}/{path}"


def _number(text: str | None, otherwise: int, most: int, least: int = 1) -> int:
    """A number of a query between two others; anything else counts as not given."""
    if text is None or not (text.isascii() and text.isdecimal() and len(text) < 19):
        return otherwise
    return min(max(int(text), least), most)


# --- an array ------------------------------------------------------------------------------------


class _ShownArray(Struct, frozen=True):
    """An array of a snapshot."""

    contents: SessionView
    node: Node
    meta: ArrayMeta

    @classmethod
    def at(cls, contents: SessionView, path: str) -> _ShownArray:
        node = contents.guarded(partial(contents.array_at, path))
        return cls(contents, node, node.array_meta)

    def chunk_map(self) -> ChunkMap:
        # A grid that is long in one direction only gets many lines.
        side = _LONG_SIDE if sum(n > 1 for n in self.meta.grid.hi) <= 1 else _SIDE
        return self.contents.guarded(partial(chunk_map, self.contents, self.node.path, side))

    def changed(self, diff: Diff | None) -> IndexArray | None:
        """The coordinates of its changed chunks, without those beyond its grid."""
        if diff is None:
            return None
        hi = np.asarray(self.meta.grid.hi, np.int64)
        found = diff.chunks.get(absolute(self.node.path), np.empty((0, len(hi)), np.int64))
        return found[(found < hi).all(axis=1)]

    def start(self, changed: IndexArray | None, table: Mapping[str, Any]) -> list[int]:
        """Where the quick look begins: at the last chunk that changed, else the last one there."""
        if changed is not None and len(changed):
            return [int(at) for at in changed[-1] * self.meta.chunk_shape]
        there = [cell["first"] for line in table["lines"] for cell in line if cell["name"]]
        return [at or 0 for at in there[-1]] if there else [0] * len(self.meta.shape)


def _look(
    request: Request, versions: dict[str, _ShownArray], start: Sequence[int]
) -> dict[str, Any] | None:
    """What the script needs to draw values, and where it begins; None if there are none."""
    shape = [max(sizes) for sizes in zip(*(a.meta.shape for a in versions.values()), strict=True)]
    if 0 in shape:
        return None
    array, query, last = versions.get("New") or versions[""], request.query_params, len(shape) - 1
    down, across = (
        _number(query.get(name), axis, last, least=0)
        for name, axis in (("vertical", last - 1), ("horizontal", last))
    )
    if down == across:
        down, across = last - 1, last
    path = array.node.path
    slices = [
        {
            "name": name,
            "slice": _link(request, "slice", one.contents.view.snapshot_id, path),
            "shape": one.meta.shape,
        }
        for name, one in versions.items()
    ]
    names = array.meta.dimension_names or (None,) * len(shape)
    return {
        "json": json.dumps({"shape": shape, "name": split(path)[1], "versions": slices}),
        "axes": [name or f"axis {axis}" for axis, name in enumerate(names)],
        "shape": shape,
        "vertical": down if last > 0 else None,
        "horizontal": across if last >= 0 else None,
        "at": [
            _number(query.get(f"at{axis}"), min(start[axis], size - 1), size - 1, least=0)
            for axis, size in enumerate(shape)
        ],
    }


def _facts(array: _ShownArray) -> list[tuple[str, str]]:
    """What the metadata of an array says, in words."""
    node = array.node
    (row,) = hierarchy({node.path: node})
    document = json.loads(next(iter(node.documents.values())))
    codecs = [*(document.get("filters") or []), document.get("compressor")]
    codecs = [c for c in document.get("codecs") or codecs if isinstance(c, dict)]
    return [
        ("Shape", row.dimensions),
        ("Type", row.type),
        ("Chunks", row.chunk.replace(" x ", " \N{MULTIPLICATION SIGN} ")),
        ("Grid", " \N{MULTIPLICATION SIGN} ".join(map(str, array.meta.grid.hi)) or "one chunk"),
        ("Codecs", ", ".join(str(c.get("name", c.get("id", ""))) for c in codecs) or "none"),
        ("Fill value", _value(document.get("fill_value"))),
        ("Format", f"Zarr v{document.get('zarr_format')}"),
    ]


def _attributes(array: _ShownArray) -> list[tuple[str, str]]:
    found = attributes_of(array.node)
    with suppress(KeyError, TypeError, ValueError, OverflowError, struct.error):
        fill = FillValueCoder.decode(found["_FillValue"], fields_of(array.node)["data_type"])
        found = {**found, "_FillValue": fill}
    return [(str(key), _value(value)) for key, value in found.items()]


def _value(value: object, most: int = _VALUE, indent: int | None = None) -> str:
    """A value of a document as text, cut where it is long."""
    is_text = isinstance(value, str)
    text = str(value) if is_text else json.dumps(value, indent=indent, ensure_ascii=False)
    return text if len(text) <= most else f"{text[:most]}… ({len(text):,} characters)"


def _text(document: bytes) -> str:
    try:
        return _value(json.loads(document), 10 * _VALUE, 2)
    except (ValueError, RecursionError):
        return _value(document.decode("utf-8", "replace"), 10 * _VALUE)
