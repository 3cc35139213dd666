"""The names right below a path of a snapshot, as a page of links that fsspec and GDAL read."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from typing import Final
from urllib.parse import quote

import numpy as np
from starlette.exceptions import HTTPException

from zarr_manifests.engine.edit.bulk_chunks import find_chunks
from zarr_manifests.engine.edit.overlay import OPAQUE, SessionView
from zarr_manifests.exporting.snapshot_source import V2_CONSOLIDATED
from zarr_manifests.format.nodes import Node
from zarr_manifests.grid import Box, IndexArray
from zarr_manifests.keys import V2_GROUP, ArrayMeta, check_inside, directory
from zarr_manifests.markup import html_text
from zarr_manifests.serving.served import OpenSnapshot
from zarr_manifests.session import estimate_of

__all__ = ["folder", "folder_page"]

_MOST_CHUNKS: Final = 100_000
_UNSAFE: Final = re.compile(
    r"""[%"'<>&?#\\\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]"""
)
_NUMBER: Final = re.compile(r"0|[1-9][0-9]{0,18}", re.ASCII)


def folder(opened: OpenSnapshot, path: str) -> list[str] | None:
    """The names right below the path, those of folders with a slash; None if there are none.

    Raises
    ------
    HTTPException
        If too many chunks may be there.
    """
    return opened.contents.guarded(lambda: _names(opened, opened.contents, path))


def _names(opened: OpenSnapshot, contents: SessionView, path: str) -> list[str] | None:
    prefix, node = directory(path), contents.node(path)
    documents = {} if node is None else node.documents
    found = set()
    for name in contents.children(prefix, chunks=False):
        is_key = name in documents or contents.node(OPAQUE + prefix + name) is not None
        found.add(name if is_key else f"{name}/")
    root = contents.node("")
    for around in contents.above(prefix) if prefix else filter(None, [root]):
        if around.array is not None:
            at = prefix[len(directory(around.path)) :].split("/")[:-1]
            found |= _chunk_names(opened, around, around.array, at)
    if V2_GROUP in documents:
        found.add(V2_CONSOLIDATED)
    return sorted(found) if found or node is not None or not path else None


def _chunk_names(opened: OpenSnapshot, node: Node, meta: ArrayMeta, at: list[str]) -> set[str]:
    """The names in a folder of chunks, given by the names of folders below the array's path."""
    ndim, lead = len(meta.shape), meta.chunk_keys.kind == "default"
    if not estimate_of(opened.session)[node.path].chunks:
        return set()
    if meta.chunk_keys.separator == "." or not ndim:
        coords = [] if at else _coords(opened, node, meta.grid).tolist()
        return {meta.chunk_keys.encode(tuple(one)) for one in coords}
    if lead and not at:
        return {"c/"}
    if lead and at.pop(0) != "c":
        return set()
    if len(at) >= ndim or not all(map(_NUMBER.fullmatch, at)):
        return set()
    lo = (*map(int, at), *meta.grid.lo[len(at) :])
    hi = (*(int(one) + 1 for one in at), *meta.grid.hi[len(at) :])
    if any(end > most for end, most in zip(hi, meta.grid.hi, strict=True)):
        return set()
    end = "" if len(at) + 1 == ndim else "/"
    return {f"{n}{end}" for n in np.unique(_coords(opened, node, Box(lo, hi))[:, len(at)])}


def _coords(opened: OpenSnapshot, node: Node, box: Box) -> IndexArray:
    refs = estimate_of(opened.session)[node.path].chunks
    if min(refs, box.size) > _MOST_CHUNKS:
        raise HTTPException(  # a part of the names would be taken for all
            501,
            f"there may be {min(refs, box.size):,} chunks in this folder, and at most "
            f"{_MOST_CHUNKS:,} are listed; read the array, whose metadata says which there can be",
        )
    table = find_chunks(opened.contents, node.path, box, None)[1]
    return np.empty((0, len(box.lo)), np.int64) if table is None else table.coords()


def folder_page(url: str, names: Sequence[str]) -> str:
    """The page of links.

    Parameters
    ----------
    url : str
        The folder's URL, with a slash at its end.
    names : sequence of str
        The names in it.
    """
    # Relative links: fsspec puts them below the URL that it asked for, whatever stands before it.
    # GDAL takes a page for that of a folder by its title.
    links = "\n".join(f'<li><a href="{_link(name)}">{html_text(name)}</a></li>' for name in names)
    return (
        '<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8">'
        f'<base href="{escape(url)}"><title>Index of {html_text(url)}</title></head>\n'
        f"<body><h1>{html_text(url)}</h1>\n<ul>\n{links}\n</ul></body>\n</html>\n"
    )


def _link(name: str) -> str:
    """The name as a relative link. Only what would not be part of a path is percent-encoded.

    fsspec takes the other characters as they are, and a link that begins like a URL for one.
    """
    check_inside(name.removesuffix("/"))
    text = _UNSAFE.sub(lambda found: quote(found[0], safe=""), name)
    return f"./{text}" if text.startswith("http") or ":" in text else text
