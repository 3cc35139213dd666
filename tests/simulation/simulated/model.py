"""What a hierarchy should hold: values, and the changes that lead from one to the next.

Arrays are one-dimensional here, with one item a chunk, so that a chunk is a number and a few
bytes. A `State` never changes; `Change.apply` gives the next.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

__all__ = [
    "Change",
    "CreateNode",
    "DeleteNode",
    "Node",
    "Resize",
    "SetAttribute",
    "SetChunk",
    "State",
    "apply_all",
    "document_of",
    "effects",
    "without_detours",
]


@dataclass(frozen=True, slots=True)
class Node:
    """A group, which has no length, or an array."""

    length: int | None
    attributes: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class State:
    """Nodes by path, and chunks by path and number."""

    nodes: Mapping[str, Node] = field(default_factory=dict)
    chunks: Mapping[tuple[str, int], bytes] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """All of it as text, to compare."""
        found = [f"{path} {node.length} {node.attributes}" for path, node in self.nodes.items()]
        found += [f"{path}[{i}] = {data!r}" for (path, i), data in self.chunks.items()]
        return sorted(found)


@dataclass(frozen=True, slots=True)
class SetChunk:
    """Write a chunk; None deletes it. `told` says whether the value depends on what was read."""

    path: str
    number: int
    data: bytes | None
    told: bool = False

    @property
    def place(self) -> tuple[object, ...]:
        return ("chunk", self.path, self.number)

    def apply(self, state: State) -> State:
        chunks = dict(state.chunks)
        if self.data is None:
            chunks.pop((self.path, self.number), None)
        else:
            chunks[self.path, self.number] = self.data
        return replace(state, chunks=chunks)


@dataclass(frozen=True, slots=True)
class SetAttribute:
    """Give an attribute of a node a value."""

    path: str
    name: str
    value: str

    @property
    def place(self) -> tuple[object, ...]:
        return ("attribute", self.path, self.name)

    def apply(self, state: State) -> State:
        node = state.nodes[self.path]
        attributes = tuple(sorted({**dict(node.attributes), self.name: self.value}.items()))
        return replace(state, nodes={**state.nodes, self.path: Node(node.length, attributes)})


@dataclass(frozen=True, slots=True)
class Resize:
    """Make an array longer (never shorter than others did), or shorter."""

    path: str
    length: int
    grow: bool

    @property
    def place(self) -> tuple[object, ...]:
        return ("length", self.path)

    def apply(self, state: State) -> State:
        node = state.nodes[self.path]
        length = max(node.length or 0, self.length) if self.grow else self.length
        chunks = {
            (path, i): data
            for (path, i), data in state.chunks.items()
            if path != self.path or i < length
        }
        return State({**state.nodes, self.path: Node(length, node.attributes)}, chunks)


@dataclass(frozen=True, slots=True)
class CreateNode:
    """Make a group, or an array of that length."""

    path: str
    length: int | None

    @property
    def place(self) -> tuple[object, ...]:
        return ("node", self.path)

    def apply(self, state: State) -> State:
        return replace(state, nodes={**state.nodes, self.path: Node(self.length)})


@dataclass(frozen=True, slots=True)
class DeleteNode:
    """Delete a node with all below it."""

    path: str

    @property
    def place(self) -> tuple[object, ...]:
        return ("node", self.path)

    def apply(self, state: State) -> State:
        def gone(path: str) -> bool:
            return path == self.path or path.startswith(self.path + "/")

        return State(
            {path: node for path, node in state.nodes.items() if not gone(path)},
            {key: data for key, data in state.chunks.items() if not gone(key[0])},
        )


type Change = SetChunk | SetAttribute | Resize | CreateNode | DeleteNode


def apply_all(state: State, changes: Iterable[Change]) -> State:
    """The state after all changes, in their order."""
    for change in changes:
        state = change.apply(state)
    return state


def effects(
    changes: Iterable[Change], before: State, after: State
) -> dict[tuple[object, ...], object]:
    """What is at each place that the changes have changed in the end; others are left out.

    Who makes something and unmakes it again has changed nothing.
    """
    found: dict[tuple[object, ...], object] = {}
    for change in changes:
        match change:
            case SetChunk(path, number):
                was, now = before.chunks.get((path, number)), after.chunks.get((path, number))
                if was != now or change.told:
                    found[change.place] = now
            case SetAttribute(path, name):
                was_given = dict(before.nodes[path].attributes) if path in before.nodes else {}
                given = dict(after.nodes[path].attributes) if path in after.nodes else {}
                if was_given.get(name) != given.get(name):
                    found[change.place] = given.get(name)
            case CreateNode(path) | DeleteNode(path):
                if path in before.nodes or path in after.nodes:
                    found[change.place] = after.nodes.get(path)
            case Resize():
                pass  # of two lengths the greater one holds; what is cut off are chunks
    return found


def without_detours(changes: Iterable[Change], base: State) -> tuple[Change, ...]:
    """The changes but for those to what is not there before and not after."""
    changes = tuple(changes)
    after = apply_all(base, changes)

    def stays(change: Change) -> bool:
        if isinstance(change, SetChunk):
            key = change.path, change.number
            if key not in base.chunks and key not in after.chunks:
                return False
        return change.path in base.nodes or change.path in after.nodes

    return tuple(change for change in changes if stays(change))


def document_of(node: Node, dimension: str) -> bytes:
    """The metadata document of a node; an array named as its dimension is a coordinate."""
    document: dict[str, object] = {
        "zarr_format": 3,
        "node_type": "group",
        "attributes": dict(node.attributes),
    }
    if node.length is not None:
        document |= {
            "node_type": "array",
            "shape": [node.length],
            "data_type": "int64",
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1]}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
            "fill_value": 0,
            "dimension_names": [dimension],
        }
    return json.dumps(document).encode()
