"""The pages: history, trees, arrays and differences as HTML that fetches nothing from elsewhere.

Names, messages and attributes are anybody's. They reach HTML through templates that escape every
value, and URLs through `quote`. Links name snapshots by id, so that what they show never changes.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from itertools import islice
from typing import Any, Final
from urllib.parse import quote, unquote

import anyio
import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from zarr_manifests.display import fields_of, hierarchy
from zarr_manifests.errors import ManifestsError, NotFoundError, SnapshotExpiredError
from zarr_manifests.format.nodes import Node
from zarr_manifests.grid import IndexArray
from zarr_manifests.keys import absolute, check_inside, split
from zarr_manifests.picturing.chunk_map import ChunkMap
from zarr_manifests.plain import plain_text
from zarr_manifests.reports import Diff, SnapshotInfo, Usage, moved_tops
from zarr_manifests.repository import Repository, graph_of
from zarr_manifests.serving.answers import status_of
from zarr_manifests.serving.chunk_cells import cell_table, chunk_json, side_for
from zarr_manifests.serving.history_graph import HistoryGraph
from zarr_manifests.serving.served import OpenSnapshot, Served
from zarr_manifests.serving.slices import fill_values
from zarr_manifests.session import chunk_map_of, estimate_of
from zarr_manifests.texts import bytes_text, count_text, time_text, totals_text, written_text
from zarr_manifests.versions import refs_by_snapshot

__all__ = ["Pages", "routes"]

_AT_ONCE: Final = 4
"""Pages made at a time: each may hold the node table of a version, and its changed chunks."""
_ROWS: Final = 60
_MOST_ROWS: Final = 1000
_NODES: Final = 1000
_LISTED: Final = 200
_VALUE: Final = 2000
_TIMES: Final = " \N{MULTIPLICATION SIGN} "
_MOST_CHANGED: Final = 2_000_000
"""Changed chunks of a commit; of more, the page does not say which they are."""


def routes(served: Served) -> list[BaseRoute]:
    """The routes of the pages of a repository."""
    return Pages(served).routes()


class Pages:
    """The pages of a repository, and what their script asks for.

    Parameters
    ----------
    served : Served
        The repository.
    """

    def __init__(self, served: Served) -> None:
        self._served = served
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
            "sums": totals_text,
            "time": time_text,
            "written": written_text,
        }

    @property
    def _repo(self) -> Repository:
        return self._served.repo

    def routes(self) -> list[BaseRoute]:
        """The routes."""
        return [
            Route("/", self._page(self._home)),
            Route("/compare", self._page(self._compare)),
            Route("/tree/{version}", self._page(self._tree)),
            Route("/array/{version}/{path:path}", self._page(self._array)),
            Route("/diff/{old}/{new}", self._page(self._diff)),
            Route("/diff/{old}/{new}/{path:path}", self._page(self._array_diff)),
            Route("/chunks/{version}/{path:path}", self._data(self._chunks)),
        ]

    def error(self, request: Request, status: int, text: str) -> Response:
        """A page that says what is wrong."""
        title = {404: "Not found", 410: "No longer here", 400: "Not understood"}
        told = {"title": title.get(status, "Something is wrong"), "text": text}
        return self._render(request, "error.html", status, **told)

    # --- what all pages share ----------------------------------------------------------------

    def _page(
        self, view: Callable[[Request], Response]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            try:
                async with self._few:
                    return await self._served.run(partial(view, request))
            except ManifestsError as error:
                return self.error(request, status_of(error), str(error))

        return endpoint

    def _data(self, view: Callable[[Request], Any]) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            async with self._few:
                found = await self._served.run(partial(view, request))
            return JSONResponse(found, headers={"Cache-Control": "no-cache"})

        return endpoint

    def _render(
        self, request: Request, template: str, status: int = 200, **values: Any
    ) -> Response:
        root, url = request.scope.get("root_path", ""), self._repo.storage.url
        text = self._templates.get_template(template).render(
            link=partial(_link, root),
            repository=url,
            name=unquote(url.rstrip("/").rpartition("/")[2]) or url,
            host=f"{request.url.scheme}://{request.url.netloc}",
            **values,
        )
        return HTMLResponse(text, status, {"Cache-Control": "no-cache"})

    def _info(self, snapshot_id: str) -> SnapshotInfo:
        return next(self._repo.ancestry(snapshot_id, limit=1))

    def _commit(self, opened: OpenSnapshot) -> dict[str, Any]:
        """What the head of a page says of a snapshot."""
        info = self._info(opened.snapshot_id)
        refs = refs_by_snapshot(self._repo.list_branches(), self._repo.list_tags())
        return {"info": info, "refs": refs.get(info.id, [])[:_LISTED]}

    def _difference(self, old: str, new: str) -> Diff:
        return self._repo.diff(old, new, symmetric=False)

    def _written_by(self, info: SnapshotInfo) -> Diff | None:
        """What a commit changed; None if that is too much, or what came before has expired."""
        changed = info.written.get("refs-set", 0) + info.written.get("refs-unset", 0)
        if info.parent_id is None or changed > _MOST_CHANGED:
            return None
        try:
            return self._difference(info.parent_id, info.id)
        except SnapshotExpiredError:
            return None

    def _node(self, opened: OpenSnapshot, path: str) -> Node:
        contents = opened.contents
        node = contents.guarded(lambda: contents.node(path))
        if node is None or node.array is None:
            raise NotFoundError(
                f"there is no array {absolute(path)} at snapshot {opened.snapshot_id}"
            )
        return node

    # --- history -----------------------------------------------------------------------------

    def _home(self, request: Request) -> Response:
        rows = _number(request.query_params.get("rows"), _ROWS, _MOST_ROWS)
        graph = HistoryGraph.of(graph_of(self._repo, rows=rows, limit=_MOST_ROWS))
        return self._render(
            request,
            "home.html",
            branches=list(islice(self._repo.list_branches().items(), _LISTED)),
            tags=list(islice(self._repo.list_tags().items(), _LISTED)),
            graph=graph,
            more=min(4 * rows, _MOST_ROWS) if graph.is_cut and rows < _MOST_ROWS else None,
        )

    def _compare(self, request: Request) -> Response:
        old, new = (
            self._served.opened(request.query_params.get(name, "main")).snapshot_id
            for name in ("old", "new")
        )
        return RedirectResponse(_link(request.scope.get("root_path", ""), "diff", old, new), 303)

    # --- trees -------------------------------------------------------------------------------

    def _tree(self, request: Request) -> Response:
        opened = self._served.opened(request.path_params["version"])
        group = request.query_params.get("group", "").strip("/")
        contents = opened.contents
        nodes = contents.guarded(contents.nodes)
        if group and group not in nodes:
            raise NotFoundError(f"there is no group {absolute(group)}")
        below = {p: n for p, n in nodes.items() if not group or f"{p}/".startswith(f"{group}/")}
        rows = list(islice(hierarchy(below), _NODES + 1))
        usage = estimate_of(opened.session)
        return self._render(
            request,
            "tree.html",
            **self._commit(opened),
            group=group,
            rows=rows[:_NODES],
            is_cut=len(rows) > _NODES,
            sizes=_sizes(usage),
            most=max((array.total.nbytes or 0 for array in usage.arrays), default=0),
            usage=usage,
        )

    # --- arrays ------------------------------------------------------------------------------

    def _array(self, request: Request) -> Response:
        opened, path = self._asked(request)
        node = self._node(opened, path)
        assert node.array is not None
        commit = self._commit(opened)
        diff = self._written_by(commit["info"])
        changed = None if diff is None else _chunks_of(diff, node)
        found = _map_of(opened, node)
        table = cell_table(found, changed, node.array.chunk_shape)
        start = _start(node, changed, table.lines)
        return self._render(
            request,
            "array.html",
            **commit,
            path=path,
            facts=_facts(node),
            attributes=_attributes(node),
            documents=[(k, _text(v)) for k, v in node.documents.items()],
            stored=(int(found.chunks.sum()), int(found.nbytes.sum())),
            whole=node.array.grid.size,
            changed=None if changed is None else len(changed),
            table=table,
            look=self._look(request, path, [("", opened, node)], start),
        )

    def _chunks(self, request: Request) -> Any:
        opened, path = self._asked(request)
        node = self._node(opened, path)
        assert node.array is not None
        diff = self._written_by(self._info(opened.snapshot_id))
        found = _map_of(opened, node)
        return chunk_json(found, None if diff is None else _chunks_of(diff, node))

    def _asked(self, request: Request) -> tuple[OpenSnapshot, str]:
        params = request.path_params
        return self._served.opened(params["version"]), params["path"].strip("/")

    def _look(
        self,
        request: Request,
        path: str,
        versions: Sequence[tuple[str, OpenSnapshot, Node]],
        start: Sequence[int],
    ) -> dict[str, Any] | None:
        """What the script needs to draw values, and where it begins; None if there are none."""
        shapes = [node.array.shape for _, _, node in versions if node.array is not None]
        shape = [max(sizes) for sizes in zip(*shapes, strict=True)]
        if 0 in shape:
            return None
        link = partial(_link, request.scope.get("root_path", ""))
        names = [axis or f"axis {n}" for n, axis in enumerate(_dimensions(versions[-1][2]))]
        query, last = request.query_params, len(shape) - 1
        down, across = (
            _number(query.get(name), axis, last, least=0)
            for name, axis in (("vertical", last - 1), ("horizontal", last))
        )
        if down == across:
            down, across = last - 1, last
        told = {
            "shape": shape,
            "name": split(path)[1],
            "versions": [
                {"name": name, "slice": link("slice", opened.snapshot_id, path), "shape": own}
                for (name, opened, _), own in zip(versions, shapes, strict=True)
            ],
        }
        return {
            "json": json.dumps(told),
            "axes": names,
            "shape": shape,
            "vertical": down if last > 0 else None,
            "horizontal": across if last >= 0 else None,
            "at": [
                _number(query.get(f"at{axis}"), min(start[axis], size - 1), size - 1, least=0)
                for axis, size in enumerate(shape)
            ],
        }

    # --- differences -------------------------------------------------------------------------

    def _diff(self, request: Request) -> Response:
        old, new = (self._served.opened(request.path_params[name]) for name in ("old", "new"))
        diff = self._difference(old.snapshot_id, new.snapshot_id)
        contents = new.contents
        arrays = {absolute(p) for p, n in contents.guarded(contents.nodes).items() if n.array}
        return self._render(
            request,
            "diff.html",
            old=self._commit(old),
            new=self._commit(new),
            lists=[
                (what, paths[:_LISTED], len(paths))
                for what, paths in (
                    ("New", diff.created),
                    ("New metadata", diff.updated),
                    ("Gone", diff.deleted),
                )
                if paths
            ],
            moved=list(islice(moved_tops(diff.moved).items(), _LISTED)),
            chunks=[(p, len(at)) for p, at in islice(diff.chunks.items(), _LISTED)],
            truncated=list(islice(diff.truncated.items(), _LISTED)),
            arrays=arrays,
        )

    def _array_diff(self, request: Request) -> Response:
        old, new = (self._served.opened(request.path_params[name]) for name in ("old", "new"))
        path = request.path_params["path"].strip("/")
        node = self._node(new, path)
        assert node.array is not None
        diff = self._difference(old.snapshot_id, new.snapshot_id)
        changed = _chunks_of(diff, node)
        found = _map_of(new, node)
        table = cell_table(found, changed, node.array.chunk_shape)
        before = old.contents.guarded(lambda: old.contents.node(path))
        versions = [("New", new, node)]
        if before is not None and before.array is not None and _rank(before) == _rank(node):
            versions.insert(0, ("Old", old, before))
        start = _start(node, changed, table.lines)
        return self._render(
            request,
            "array_diff.html",
            old=self._commit(old),
            new=self._commit(new),
            path=path,
            is_new=len(versions) == 1,
            changed=len(changed),
            whole=node.array.grid.size,
            table=table,
            look=self._look(request, path, versions, start),
        )


def _shown(value: object) -> object:
    """What a template puts out: control characters written out, so that nothing is disguised."""
    if isinstance(value, Markup) or not isinstance(value, str):
        return value
    return plain_text(value, lines=True)


def _link(root: str, *parts: object) -> str:
    """A path on this server; names of arrays keep their slashes."""
    names = [str(part) for part in parts]  # escaped dots would climb, too
    return root + "/" + "/".join(quote(name and check_inside(name), safe="/~") for name in names)


def _number(text: str | None, otherwise: int, most: int, least: int = 1) -> int:
    """A number of a query between two others; anything else counts as not given."""
    if text is None or not (text.isascii() and text.isdecimal() and len(text) < 19):
        return otherwise
    return min(max(int(text), least), most)


def _sizes(usage: Usage) -> dict[str, Any]:
    return {array.path.strip("/"): array for array in usage.arrays}


def _rank(node: Node) -> int:
    return len(_dimensions(node))


def _dimensions(node: Node) -> tuple[str | None, ...]:
    assert node.array is not None
    return node.array.dimension_names or (None,) * len(node.array.shape)


def _chunks_of(diff: Diff, node: Node) -> IndexArray:
    """The coordinates of an array's changed chunks, without those beyond its grid."""
    assert node.array is not None
    hi = np.asarray(node.array.grid.hi, np.int64)
    found = diff.chunks.get(absolute(node.path))
    if found is None:
        return np.empty((0, len(hi)), np.int64)
    return found[(found < hi).all(axis=1)]


def _map_of(opened: OpenSnapshot, node: Node) -> ChunkMap:
    assert node.array is not None
    side = side_for(node.array.grid.hi)
    return opened.contents.guarded(lambda: chunk_map_of(opened.session, node.path, side=side))


def _start(node: Node, changed: IndexArray | None, lines: Iterable[Sequence[Any]]) -> list[int]:
    """Where the quick look begins: at the last chunk that has changed, else the last one there."""
    assert node.array is not None
    if changed is not None and len(changed):
        places = zip(changed[-1].tolist(), node.array.chunk_shape, strict=True)
        return [at * size for at, size in places]
    there = [cell for line in lines for cell in line if cell.name]
    return [at or 0 for at in there[-1].first] if there else [0] * len(node.array.shape)


def _facts(node: Node) -> list[tuple[str, str]]:
    """What the metadata of an array says, in words."""
    array = node.array
    assert array is not None
    document = json.loads(next(iter(node.documents.values())))
    sizes = [
        str(size) if name is None else f"{name}: {size:,}"
        for name, size in zip(_dimensions(node), array.shape, strict=True)
    ]
    kind = fields_of(node).get("data_type", "")
    found = [
        ("Shape", f"({', '.join(sizes)})"),
        ("Type", str(kind.get("name", "") if isinstance(kind, dict) else kind)),
        ("Chunks", _TIMES.join(f"{n:,}" for n in array.chunk_shape) or "scalar"),
        ("Grid", _TIMES.join(f"{n:,}" for n in array.grid.hi) or "one chunk"),
    ]
    codecs = document.get("codecs") or [
        *(document.get("filters") or []),
        document.get("compressor"),
    ]
    names = [str(c.get("name", c.get("id", ""))) for c in codecs if isinstance(c, dict)]
    found.append(("Codecs", ", ".join(names) or "none"))
    found.append(("Fill value", _value(document.get("fill_value"))))
    found.append(("Format", f"Zarr v{document.get('zarr_format')}"))
    return found


def _value(value: object) -> str:
    """A value of a document as text, cut where it is long."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _VALUE else f"{text[:_VALUE]}… ({len(text):,} characters)"


def _text(document: bytes) -> str:
    try:
        text = json.dumps(json.loads(document), indent=2, ensure_ascii=False)
    except (ValueError, RecursionError):
        text = document.decode("utf-8", "replace")
    return (
        text if len(text) <= 10 * _VALUE else f"{text[: 10 * _VALUE]}… ({len(text):,} characters)"
    )


def _attributes(node: Node) -> list[tuple[str, str]]:
    fields = fields_of(node)
    found = fields.get("attributes")
    if not isinstance(found, dict):
        return []
    fill = found.get("_FillValue")
    if isinstance(fill, str) and str(fields.get("data_type")).startswith("float"):
        found = {**found, "_FillValue": next(iter(fill_values(fill)), fill)}
    return [(str(k), _value(v)) for k, v in found.items()]
