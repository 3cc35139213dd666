"""The page names all that the code writes, and nothing else.

What the names mean is compared by the independent reader; this finds what one of the two lacks.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from msgspec.structs import fields

import zarr_manifests.format
from zarr_manifests.config import Config
from zarr_manifests.config.sections import Option, options_of
from zarr_manifests.format.chunk_table import COLUMNS
from zarr_manifests.format.records import BlobRef, ObjectKind, Record
from zarr_manifests.format.root import FEATURES

TEXT = (Path(__file__).parents[2] / "docs" / "spec" / "v1.md").read_text(encoding="utf-8")
ENCODER = re.compile(r"(^|_)(encode|pack|in_blocks)")
FORMAT = Path(zarr_manifests.format.__path__[0])


def tables(*heads: str) -> Iterator[list[str]]:
    """The rows of all tables whose first column has one of these names."""
    for found in re.finditer(r"^\| (.+?) \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", TEXT, re.MULTILINE):
        if found[1] in heads:
            for row in found[2].splitlines():
                yield [cell.strip() for cell in row.strip("|").split("|")]


def named(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def written() -> set[str]:
    """The keys of the maps that encoders make, and the names of columns."""
    for path in FORMAT.glob("*.py"):  # a record is known once its module is imported
        import_module(f"zarr_manifests.format.{path.stem}")
    found = {one.encode_name for kind in (BlobRef, *records_of(Record)) for one in fields(kind)}
    for path in FORMAT.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and ENCODER.search(node.name):
                found |= set(keys_in(node))
    return found | {*COLUMNS}


def records_of(kind: type[Record]) -> Iterator[type[Record]]:
    for below in kind.__subclasses__():
        yield below
        yield from records_of(below)


def keys_in(function: ast.FunctionDef) -> Iterator[str]:
    for node in ast.walk(function):
        keys: list[ast.expr | None] = []
        if isinstance(node, ast.Dict):
            keys = node.keys
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            keys = [node.slice]
        yield from (
            key.value
            for key in keys
            if isinstance(key, ast.Constant) and isinstance(key.value, str)
        )


def test_the_page_names_every_field_and_no_other() -> None:
    said = {name for row in tables("field", "column") for name in named(row[0])}
    assert said == written()


def test_the_page_lists_every_kind_of_object() -> None:
    numbers = {n for row in tables("key") for n in re.findall(r"\d+", row[2])}
    assert numbers == {str(int(kind)) for kind in ObjectKind}


def test_the_page_lists_every_feature() -> None:
    assert [named(row[0])[0] for row in tables("feature")] == [*FEATURES]


def options() -> dict[tuple[str, ...], Option]:
    found: dict[tuple[str, ...], Option] = {}
    for name, option in options_of(Config).items():
        section = getattr(option.kind, "section", None)
        if section is None or name == "chunk-manifests":
            found[(name,)] = option
        else:
            found |= {(name, inner): one for inner, one in options_of(section).items()}
    return found


def test_the_page_lists_every_option() -> None:
    rows = {tuple(named(row[0])): row for row in tables("name") if named(row[0])}
    due = options()
    assert due.keys() <= rows.keys()
    for names, option in due.items():
        _, bounds, default, _ = rows[names]
        schema = getattr(option.kind, "schema", {})
        if "minimum" in schema:
            assert bounds.startswith(f"{schema['minimum']:,} to {schema['maximum']:,}"), names
        if "enum" in schema:
            assert named(bounds) == schema["enum"], names
        if isinstance(option.default, int | str):
            said = option.default if isinstance(option.default, str) else f"{option.default:,}"
            assert default.strip("`") == said, names
