"""Checks recorded transactions of concurrent sessions for the isolation that was promised.

The order of versions is not guessed: the branch's history says who committed after whom, so the
edges between transactions are exact. `ww` leads from a version's writer to the next one's, `wr`
from a version's writer to who read it, `rw` from who read a version to who wrote the next. With
these, by the names that Adya gave them:

- *G1a*, a read of what no committed transaction wrote; *G1b*, of what its writer wrote over again;
  *G1c*, a cycle of `ww` and `wr`.
- *G-SIa*: a transaction overwrites a version that was committed after it began (a lost update), or
  reads one. *G-SIb*: it misses one that was committed before it began.
- *G2*: a cycle of which each `rw` leaves a transaction that asked to be serialisable. Others may
  skew; a serialisable one has no `rw` to what was committed before it, so its edges go forward.

Besides, an acknowledged commit is in the history exactly once, a refused one is not, a transaction
reads what it wrote itself, and a client's next transaction begins no earlier than its last commit.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

__all__ = ["Operation", "Transaction", "Violation", "check_isolation"]

_OLDEST: Final = -1
_NOBODY: Final = ""


@dataclass(frozen=True, slots=True)
class Operation:
    """One read or write of a transaction.

    Parameters
    ----------
    kind : {"read", "write"}
        What it did.
    key : str
        Of what.
    value : hashable
        What was found there or put there; None if nothing was there, or it was deleted. The
        more values differ from each other, the more is found out.
    """

    kind: Literal["read", "write"]
    key: str
    value: Hashable


@dataclass(frozen=True, slots=True)
class Transaction:
    """What one session did, from its begin to its commit.

    Parameters
    ----------
    name : str
        Unlike that of any other; the history tells by it who made a snapshot.
    began_at : str
        Id of the snapshot that the session began with.
    operations : tuple of Operation
        In the order they were done.
    outcome : {"committed", "refused", "unknown", "reader"}
        What its commit said: unknown if it never answered, reader if there was none to make.
    snapshot_id : str, optional
        What a commit that was acknowledged returned.
    serializable : bool
        Whether that was asked for.
    client : str, optional
        Whose it was; a client does one transaction after another.
    """

    name: str
    began_at: str
    operations: tuple[Operation, ...]
    outcome: Literal["committed", "refused", "unknown", "reader"]
    snapshot_id: str | None = None
    serializable: bool = False
    client: str = ""


@dataclass(frozen=True, slots=True)
class Violation:
    """One thing that must not be.

    Parameters
    ----------
    kind : str
        `lost`, `duplicate`, `refused`, `internal`, `order`, or one of Adya's names.
    transactions : tuple of str
        Names of those that are in it.
    text : str
        What happened.
    """

    kind: str
    transactions: tuple[str, ...]
    text: str


def check_isolation(
    transactions: Iterable[Transaction], history: Sequence[tuple[str, str]]
) -> list[Violation]:
    """Whatever is wrong with these transactions; empty if nothing is.

    Parameters
    ----------
    transactions : iterable of Transaction
        All there were; those of one client in the order it did them.
    history : sequence of (str, str)
        The branch's snapshots, oldest first: id, and name of the transaction that made it, or an
        empty text if that was none of these.

    Returns
    -------
    list of Violation

    Raises
    ------
    ValueError
        If two transactions have one name, or one began at a snapshot that is not in the history.

    Examples
    --------
    >>> from zarr_manifests.testing import Operation, Transaction, check_isolation
    >>> def add_one(name, snapshot_id):
    ...     operations = Operation("read", "x", None), Operation("write", "x", name)
    ...     return Transaction(name, "s0", operations, "committed", snapshot_id)
    >>> history = [("s0", ""), ("s1", "first"), ("s2", "second")]
    >>> [found] = check_isolation([add_one("first", "s1"), add_one("second", "s2")], history)
    >>> found.kind, found.transactions
    ('G-SIa', ('first', 'second'))
    """
    return _Checker(list(transactions), history).violations()


@dataclass(frozen=True, slots=True)
class _Version:
    """A value that a key had from one place in the history on."""

    at: int
    writer: str
    value: Hashable


@dataclass(slots=True)
class _Graph:
    edges: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))

    def add(self, one: str, other: str) -> None:
        if one != other and _NOBODY not in (one, other):
            self.edges[one].add(other)

    def cycle(self) -> tuple[str, ...] | None:
        """Some cycle; None if there is none."""
        done: set[str] = set()
        for start in sorted(self.edges):
            path: list[str] = []
            on_path: dict[str, int] = {}
            stack: list[tuple[str, bool]] = [(start, False)]
            while stack:
                node, leaving = stack.pop()
                if leaving:
                    done.add(path.pop())
                    del on_path[node]
                elif node in on_path:
                    return tuple(path[on_path[node] :])
                elif node not in done:
                    on_path[node] = len(path)
                    path.append(node)
                    stack.append((node, True))
                    stack += [(other, False) for other in sorted(self.edges.get(node, ()))]
        return None


class _Checker:
    def __init__(
        self, transactions: Sequence[Transaction], history: Sequence[tuple[str, str]]
    ) -> None:
        self._transactions = transactions
        self._by_name = {one.name: one for one in transactions}
        if len(self._by_name) != len(transactions):
            raise ValueError("two transactions have the same name")
        self._snapshots = {snapshot_id: at for at, (snapshot_id, _) in enumerate(history)}
        self._places: dict[str, list[int]] = defaultdict(list)
        for at, (_, name) in enumerate(history):
            self._places[name].append(at)
        for one in transactions:
            if one.began_at not in self._snapshots:
                raise ValueError(f"{one.name} began at {one.began_at}, which is not in history")
        self._versions: Mapping[str, list[_Version]] = self._all_versions()
        self._found: list[Violation] = []

    def violations(self) -> list[Violation]:
        self._check_outcomes()
        self._check_order()
        self._check_lost_updates()
        plain, full = _Graph(), _Graph()
        for graph in (plain, full):
            for versions in self._versions.values():
                for before, after in itertools.pairwise(versions):
                    graph.add(before.writer, after.writer)
        for one in self._transactions:
            self._check_reads(one, plain, full)
        for kind, graph in (("G1c", plain), ("G2", full)):
            cycle = graph.cycle()
            if cycle is not None:
                self._note(kind, cycle, "each depends on the next, and the last on the first")
                break  # a cycle of the one graph is one of the other, too
        return self._found

    def _note(self, kind: str, names: Iterable[str], text: str) -> None:
        self._found.append(Violation(kind, tuple(names), text))

    def _place(self, one: Transaction) -> int | None:
        """Where in the history its commit is; None if it did not land."""
        places = self._places.get(one.name)
        return places[0] if places else None

    def _all_versions(self) -> dict[str, list[_Version]]:
        """By key, oldest first; first what was there before, which nobody wrote."""
        found: dict[str, list[_Version]] = {}
        for one in self._transactions:
            for operation in one.operations:
                found.setdefault(operation.key, [_Version(_OLDEST, _NOBODY, None)])
            at = self._place(one)
            if at is not None:
                for key, value in _last_writes(one).items():
                    found[key].append(_Version(at, one.name, value))
        for versions in found.values():
            versions.sort(key=lambda version: version.at)
        return found

    def _check_outcomes(self) -> None:
        for one in self._transactions:
            places = self._places.get(one.name, [])
            ids = [i for i, at in self._snapshots.items() if at in places]
            if len(places) > 1:
                self._note("duplicate", [one.name], f"it is in the history {len(places)} times")
            elif one.outcome == "committed" and ids != [one.snapshot_id]:
                text = f"it was acknowledged as {one.snapshot_id}, and the history has {ids}"
                self._note("lost", [one.name], text)
            elif places and one.outcome in ("refused", "reader"):
                self._note("refused", [one.name], "it is in the history all the same")

    def _check_order(self) -> None:
        last: dict[str, tuple[int, str]] = {}
        for one in self._transactions:
            if not one.client:
                continue
            at, name = last.get(one.client, (_OLDEST, _NOBODY))
            if self._snapshots[one.began_at] < at:
                self._note("order", [name, one.name], "it began before its client's last commit")
            place = self._place(one)
            if place is not None:
                last[one.client] = place, one.name

    def _check_lost_updates(self) -> None:
        for key, versions in self._versions.items():
            for before, after in itertools.pairwise(versions):
                began = self._snapshots[self._by_name[after.writer].began_at]
                if before.at > began:
                    text = f"{after.writer} wrote {key} over {before.writer}'s, which came later"
                    self._note("G-SIa", [before.writer, after.writer], text + " than its begin")

    def _check_reads(self, one: Transaction, plain: _Graph, full: _Graph) -> None:
        own: dict[str, Hashable] = {}
        for operation in one.operations:
            key, value = operation.key, operation.value
            if operation.kind == "write":
                own[key] = value
            elif key not in own:
                read = self._read_version(one, key, value)
                if read is None:
                    continue
                versions = self._versions[key]
                plain.add(versions[read].writer, one.name)
                full.add(versions[read].writer, one.name)
                if read + 1 < len(versions) and (one.serializable or one.outcome == "reader"):
                    full.add(one.name, versions[read + 1].writer)
            elif own[key] != value:
                self._note("internal", [one.name], f"it wrote {key}: {own[key]!r}, read {value!r}")

    def _read_version(self, one: Transaction, key: str, value: Hashable) -> int | None:
        """The version of the key that it has read, as a place among them; what is wrong is noted.

        Of several with that value it is the one that it was to read, or else the last.
        """
        versions, began = self._versions[key], self._snapshots[one.began_at]
        due = max(i for i, version in enumerate(versions) if version.at <= began)
        if versions[due].value == value:
            return due
        same = [i for i, version in enumerate(versions) if version.value == value]
        if not same:
            writers = self._writers(key, value)
            landed = [w.name for w in writers if self._place(w) is not None]
            text = f"it read {key}: {value!r}, which was "
            if landed:
                self._note("G1b", [*landed, one.name], text + "written over by its own writer")
            else:
                names = [writer.name for writer in writers]
                self._note("G1a", [*names, one.name], text + "never committed")
            return None
        read = same[-1]
        at, owed = versions[read], versions[due]
        kind = "G-SIa" if at.at > began else "G-SIb"
        text = f"it read {key}: {value!r}, and its snapshot has {owed.value!r}"
        names = [name for name in (at.writer, owed.writer, one.name) if name != _NOBODY]
        self._note(kind, names, text)
        return read

    def _writers(self, key: str, value: Hashable) -> list[Transaction]:
        return [
            one for one in self._transactions if Operation("write", key, value) in one.operations
        ]


def _last_writes(one: Transaction) -> dict[str, Hashable]:
    return {op.key: op.value for op in one.operations if op.kind == "write"}
