"""What a hierarchy should hold: values, and the changes that lead from one to the next.

Arrays are one-dimensional here, with one item a chunk, so that a chunk is a number and a few
bytes. A `State` never changes; `Change.apply` gives the next.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace


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


def merged_state(base: State, one: State, other: State) -> State | None:
    """What has the changes of both since the base; None where they contradict each other."""
    nodes: dict[str, Node] = {}
    for path in {**one.nodes, **other.nodes}:
        if path not in one.nodes or path not in other.nodes:
            made = one.nodes.get(path) or other.nodes[path]
            if path not in base.nodes:
                nodes[path] = made
            continue
        was = base.nodes.get(path, Node(one.nodes[path].length))
        found = _merged_node(was, one.nodes[path], other.nodes[path])
        if found is None:
            return None
        nodes[path] = found
    chunks: dict[tuple[str, int], bytes] = {}
    for key in {**base.chunks, **one.chunks, **other.chunks}:
        was_there, a, b = (state.chunks.get(key) for state in (base, one, other))
        if a not in (b, was_there) and b != was_there:
            return None
        data = b if a == was_there else a
        if data is not None and key[0] in nodes:
            chunks[key] = data
    return State(nodes, chunks)


def _merged_node(base: Node, one: Node, other: Node) -> Node | None:
    length = other.length if one.length == base.length else one.length
    if other.length not in (base.length, length):
        if min(one.length or 0, other.length or 0) < (base.length or 0):
            return None
        length = max(one.length or 0, other.length or 0)
    was, a, b = dict(base.attributes), dict(one.attributes), dict(other.attributes)
    attributes = {}
    for name in {**a, **b}:
        if a.get(name) not in (b.get(name), was.get(name)) and b.get(name) != was.get(name):
            return None
        attributes[name] = b.get(name) if a.get(name) == was.get(name) else a.get(name)
    kept = {name: value for name, value in attributes.items() if value is not None}
    return Node(length, tuple(sorted(kept.items())))


def differences(old: State, new: State) -> tuple[Change, ...]:
    """Changes that lead from one state to the other."""
    changes: list[Change] = [DeleteNode(path) for path in old.nodes if path not in new.nodes]
    for path, node in sorted(new.nodes.items()):
        if path not in old.nodes:
            changes.append(CreateNode(path, node.length))
        elif node.length is not None and node.length != old.nodes[path].length:
            changes.append(Resize(path, node.length, node.length > (old.nodes[path].length or 0)))
        given = dict(old.nodes[path].attributes) if path in old.nodes else {}
        changes += [
            SetAttribute(path, name, value)
            for name, value in node.attributes
            if given.get(name) != value
        ]
    changes += [
        SetChunk(*key, new.chunks.get(key))
        for key in {**old.chunks, **new.chunks}
        if old.chunks.get(key) != new.chunks.get(key) and key[0] in new.nodes
    ]
    return tuple(changes)


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
