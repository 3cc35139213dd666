"""Checking recorded transactions of concurrent sessions for the promised isolation.

The branch's history gives the order of versions, so the edges between transactions are exact: `ww`
leads from the writer of a version to the writer of the next, `wr` from the writer of a version to
its readers, `rw` from the readers of a version to the writer of the next. The anomalies, by Adya's
names:

- *G1a*: a read of something that no committed transaction wrote. *G1b*: a read of something that
  its writer overwrote itself. *G1c*: a cycle of `ww` and `wr`.
- *G-SIa*: a transaction overwrites a version that was committed after it began (a lost update), or
  reads one. *G-SIb*: it misses a version that was committed before it began.
- *G2*: a cycle in which each `rw` starts at a transaction that asked to be serializable. Others may
  have write skew. A serializable one has no `rw` to an earlier commit, so its edges lead forward.

Also checked: an acknowledged commit is in the history exactly once, and a refused one is not; a
transaction reads its own writes; a client's next transaction begins no earlier than its last
commit.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

__all__ = ["Access", "Transaction", "Violation", "check_isolation"]

_OLDEST: Final = -1
_NOBODY: Final = ""


@dataclass(frozen=True, slots=True)
class Access:
    """One read or write of a transaction.

    Parameters
    ----------
    kind : {"read", "write"}
        What it did.
    key : str
        What it read or wrote.
    value : hashable
        The value found or written; None if there was none, or it was deleted. Distinct values
        reveal more violations.
    """

    kind: Literal["read", "write"]
    key: str
    value: Hashable


@dataclass(frozen=True, slots=True)
class Transaction:
    """The operations of one session, from its start to its commit.

    Parameters
    ----------
    name : str
        A unique name, by which the history identifies the author of a snapshot.
    began_at : str
        Id of the snapshot at which the session began.
    operations : tuple of Access
        In the order in which they were done.
    outcome : {"committed", "refused", "unknown", "reader"}
        The outcome of its commit: unknown if it never answered, reader if it made none.
    snapshot_id : str, optional
        The id that an acknowledged commit returned.
    serializable : bool
        Whether it asked to be serializable.
    client : str, optional
        The client that ran it; a client runs its transactions one after another.
    """

    name: str
    began_at: str
    operations: tuple[Access, ...]
    outcome: Literal["committed", "refused", "unknown", "reader"]
    snapshot_id: str | None = None
    serializable: bool = False
    client: str = ""


@dataclass(frozen=True, slots=True)
class Violation:
    """A violation of the promised isolation.

    Parameters
    ----------
    kind : str
        `lost`, `duplicate`, `refused`, `internal`, `order`, or one of Adya's names.
    transactions : tuple of str
        Names of the transactions involved.
    text : str
        What happened.
    """

    kind: str
    transactions: tuple[str, ...]
    text: str


def check_isolation(
    transactions: Iterable[Transaction], history: Sequence[tuple[str, str]]
) -> list[Violation]:
    """Return the violations in these transactions; empty if there are none.

    Parameters
    ----------
    transactions : iterable of Transaction
        All transactions; those of one client in the order in which it ran them.
    history : sequence of (str, str)
        The branch's snapshots, oldest first: the id, and the name of the transaction that made it,
        or an empty string for none of these.

    Returns
    -------
    list of Violation

    Raises
    ------
    ValueError
        If two transactions have the same name, or one began at a snapshot not in the history.

    Examples
    --------
    >>> from isolation import Access, Transaction, check_isolation
    >>> def add_one(name, snapshot_id):
    ...     operations = Access("read", "x", None), Access("write", "x", name)
    ...     return Transaction(name, "s0", operations, "committed", snapshot_id)
    >>> history = [("s0", ""), ("s1", "first"), ("s2", "second")]
    >>> [found] = check_isolation([add_one("first", "s1"), add_one("second", "s2")], history)
    >>> found.kind, found.transactions
    ('G-SIa', ('first', 'second'))
    """
    return _Checker(list(transactions), history).violations()


@dataclass(frozen=True, slots=True)
class _Version:
    """A value of a key, from one place in the history on."""

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
        """Return a cycle, or None if there is none."""
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
                break  # a cycle of the one graph is also one of the other
        return self._found

    def _note(self, kind: str, names: Iterable[str], text: str) -> None:
        self._found.append(Violation(kind, tuple(names), text))

    def _place(self, one: Transaction) -> int | None:
        """The place of its commit in the history; None if it did not land."""
        places = self._places.get(one.name)
        return places[0] if places else None

    def _all_versions(self) -> dict[str, list[_Version]]:
        """The versions of each key, oldest first; the first is the initial state."""
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
        """The version of the key that it has read, by its position; violations are noted.

        Of several versions with that value, it is the expected one if possible, else the last.
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
        return [one for one in self._transactions if Access("write", key, value) in one.operations]


def _last_writes(one: Transaction) -> dict[str, Hashable]:
    return {op.key: op.value for op in one.operations if op.kind == "write"}
