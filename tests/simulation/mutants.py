"""Faults put into the package on purpose, each of which the simulation must find.

A mutant replaces functions of the package by ones that leave a mechanism out, and has a seed that
finds it; `python tests/simulation/mutants.py` looks for one for those that have none any more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from msgspec.structs import replace

from simulated import Outcome, simulate
from zarr_manifests import commits
from zarr_manifests.engine import ancestry, forks, heartbeat, landing, leases, refs, roots
from zarr_manifests.engine import commit_changes as commit
from zarr_manifests.engine import rebase as rebasing
from zarr_manifests.engine.forks import Merge
from zarr_manifests.engine.objects import SessionKeys
from zarr_manifests.engine.roots import Roots
from zarr_manifests.engine.upkeep import collect, recover, verify
from zarr_manifests.engine.upkeep import compaction as compact
from zarr_manifests.errors import CommitOutcomeUnknownError, StorageError
from zarr_manifests.format.chunk_table import RefKind
from zarr_manifests.format.manifest import Delta
from zarr_manifests.format.root import ROOT_KEY
from zarr_manifests.ids import new_session_id
from zarr_manifests.planning import conflict as rules
from zarr_manifests.planning.merge import select

BUDGET = 2000
"""How many seeds may be tried for a mutant: as many as `make seeds` tries."""


@dataclass(frozen=True)
class Mutant:
    """A fault: what the package does wrong, which seed finds it, and who takes part besides."""

    name: str
    says: str
    seed: int
    put_in: Callable[[pytest.MonkeyPatch], None]
    kinds: tuple[str, ...]


MUTANTS: list[Mutant] = []


def mutant(
    says: str, seed: int, *kinds: str
) -> Callable[[Callable[[pytest.MonkeyPatch], None]], None]:
    def enter(put_in: Callable[[pytest.MonkeyPatch], None]) -> None:
        name = put_in.__name__.replace("_", "-")
        MUTANTS.append(Mutant(name, says, seed, put_in, kinds))

    return enter


# --- the swap ----------------------------------------------------------------------------------


@mutant("The root is overwritten without comparing its version.", 0)
def swap_without_compare(patch: pytest.MonkeyPatch) -> None:
    swap = Roots.swap

    def always(self: Any, at: Any, new: Any, *args: Any, **more: Any) -> Any:
        token = self._storage.get_tagged(ROOT_KEY).token
        return swap(self, replace(at, token=token), new, *args, **more)

    patch.setattr(Roots, "swap", always)


@mutant("A lost answer is looked up in the newest root only, not in its log.", 68)
def log_walk_left_out(patch: pytest.MonkeyPatch) -> None:
    def newest_only(self: Any, found: Any, new: Any, *args: Any, **more: Any) -> Any:
        return found if found.root.write_id == new.write_id else None

    patch.setattr(Roots, "_outcome", newest_only)


@mutant("A swap with an unknown outcome is treated as lost to another writer.", 96)
def unknown_taken_for_lost(patch: pytest.MonkeyPatch) -> None:
    swap = Roots.swap

    def guess(self: Any, *args: Any, **more: Any) -> Any:
        try:
            return swap(self, *args, **more)
        except CommitOutcomeUnknownError:
            return None

    patch.setattr(Roots, "swap", guess)


@mutant("The swap is made although an earlier upload failed.", 1)
def failed_uploads_ignored(patch: pytest.MonkeyPatch) -> None:
    upload = landing._upload

    def careless(context: Any, calls: Any, *args: Any) -> None:
        def attempt(call: Callable[[], object]) -> None:
            with contextlib.suppress(StorageError):
                call()

        upload(context, [lambda call=call: attempt(call) for call in calls], *args)

    patch.setattr(landing, "_upload", careless)


@mutant("The first session after opening may begin at any root seen before.", 39)
def old_root_reused(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(refs, "_FRESH_S", 1e9)
    patch.setattr(Roots, "undisturbed", lambda self, at: True)


# --- streams -----------------------------------------------------------------------------------


@mutant("A step's mark is compared when its commit begins, not where it lands.", 3, "streams")
def marks_compared_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(commit, "check_marks", lambda *_: None)


@mutant("Whether a step is committed is found out after conflicts and the fence.", 0, "streams")
def marks_compared_last(patch: pytest.MonkeyPatch) -> None:
    check, after = commit.check_marks, commit.marks_after
    due: list[Any] = []

    def later(context: Any, root: Any, *args: Any) -> None:
        due[:] = [root, *args]

    def checked(context: Any, *args: Any) -> Any:
        check(context, *due)
        return after(context, *args)

    patch.setattr(commit, "check_marks", later)
    patch.setattr(commit, "marks_after", checked)
    patch.setattr(commits, "check_now", lambda *_: None)


@mutant("A root that was read earlier may say that a step is committed.", 37, "streams")
def marks_of_an_old_root(patch: pytest.MonkeyPatch) -> None:
    def stale(context: Any, branch: str, txn: Any) -> None:
        root = context.roots.with_branch(context.roots.latest.root, branch)
        landing.check_marks(context, root, branch, txn)

    patch.setattr(commits, "check_now", stale)


@mutant("Marks are those of the snapshot that the session read.", 4, "streams")
def marks_of_the_base(patch: pytest.MonkeyPatch) -> None:
    land, after = commit.land, commit.marks_after
    base: list[Any] = []

    def noted(c: Any, branch: str, keys: Any, view: Any, make: Any, *args: Any, **more: Any) -> Any:
        def on_base(root: Any) -> Any:
            base[:] = [view.snapshot]
            return make(root)

        return land(c, branch, keys, view, on_base, *args, **more)

    patch.setattr(commit, "land", noted)
    patch.setattr(commit, "marks_after", lambda c, _, *args: after(c, base[0], *args))


@mutant("A compaction drops the marks.", 4, "streams")
def marks_lost_in_a_compaction(patch: pytest.MonkeyPatch) -> None:
    made = compact.rewritten

    def without(*args: Any, **more: Any) -> Any:
        return made(*args, **more, marks={})

    patch.setattr(compact, "rewritten", without)


@mutant("Versions that are missing before a step are not noticed.", 8, "streams")
def gaps_ignored(patch: pytest.MonkeyPatch) -> None:
    check = landing._check_txn

    def any_lower(context: Any, tip: Any, head: Any, txn: Any, branch: str) -> None:
        check(context, tip, head, replace(txn, after=None), branch)

    patch.setattr(landing, "_check_txn", any_lower)


# --- conflicts and branches --------------------------------------------------------------------


@mutant("A commit is rebased onto anything.", 3)
def conflicts_ignored(patch: pytest.MonkeyPatch) -> None:
    rebase = rebasing.rebase
    patch.setattr(rebasing, "rebase", lambda *a, **k: replace(rebase(*a, **k), conflicts=()))


@mutant("A rebase ignores what the commit has read.", 26)
def dependent_reads_left_out(patch: pytest.MonkeyPatch) -> None:
    rebase = rebasing.rebase
    patch.setattr(rebasing, "rebase", lambda *a, **k: rebase(*a, **{**k, "reads": None}))


@mutant("A commit ignores what its serializable session has read.", 26)
def serializable_reads_left_out(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rules, "_read_conflicts", lambda *args: iter(()))


@mutant("Chunks that a policy leaves to others are overwritten.", 22)
def left_to_others_and_written(patch: pytest.MonkeyPatch) -> None:
    rebase = rebasing.rebase
    patch.setattr(
        rebasing, "rebase", lambda *args, **options: replace(rebase(*args, **options), dropped={})
    )


@mutant("A relocated append loses its chunks.", 15)
def appended_chunks_lost(patch: pytest.MonkeyPatch) -> None:
    shift = rebasing._shift
    patch.setattr(rebasing, "_shift", lambda to, move: shift(to, replace(move, steps=None)))


@mutant("A commit lands on a branch that was reset to a history without its base.", 5)
def any_base_will_do(patch: pytest.MonkeyPatch) -> None:
    between = rebasing.deltas_between
    patch.setattr(rebasing, "deltas_between", lambda *args: between(*args) or [])


@mutant("Earlier commits are assumed to touch other chunks, wherever theirs are.", 6)
def all_is_apart(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rebasing, "apart", lambda mine, theirs: True)


@mutant("A head is amended although the branch has moved.", 1)
def amended_unseen(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(commit, "_amends", lambda head: None)


@mutant("Whatever exists can be named, although a collection deletes parts of it.", 0, "finders")
def refs_to_anywhere(patch: pytest.MonkeyPatch) -> None:
    def anywhere(context: Any, root: Any, snapshot_id: str) -> Any:
        ref = ancestry.snapshot_ref(context, snapshot_id)
        return ref, context.objects.load(ref, commit.Snapshot), None

    patch.setattr(ancestry, "find_left", anywhere)


@mutant("Refs can be restored from before the last collection.", 1)
def restore_without_guard(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(recover, "_check_restorable", lambda root, version: None)


# --- forks -------------------------------------------------------------------------------------


@mutant("One fork's write is overwritten by another's.", 20)
def merge_overwrites(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Merge, "_chunk_conflicts", lambda *args: [])


@mutant("A copy that is merged twice conflicts with itself.", 4)
def merge_without_dedupe(patch: pytest.MonkeyPatch) -> None:
    begin = Merge.__init__

    def begun(self: Merge, *args: Any, **options: Any) -> None:
        begin(self, *args, **options)
        self.merged = {}
        self._same = lambda *args: False

    patch.setattr(Merge, "__init__", begun)


@mutant("A fork of another session is merged.", 675)
def strangers_merged(patch: pytest.MonkeyPatch) -> None:
    merge = forks.merge_forks

    def anyone(workspace: Any, states: Any) -> None:
        here = (workspace.contents.view.ref, workspace.keys.lineage)
        states = [replace(state, head=here[0], lineage=here[1]) for state in states]
        merge(workspace, states)

    patch.setattr(forks, "merge_forks", anyone)


@mutant("A copy writes objects under the names of its original session.", 4)
def copies_share_names(patch: pytest.MonkeyPatch) -> None:
    draw = SessionKeys._draw

    def same(self: Any) -> Any:
        own = draw(self)
        own.session_id = new_session_id(self.start, self.lineage + bytes(6))
        return own

    patch.setattr(SessionKeys, "_draw", same)


# --- compaction --------------------------------------------------------------------------------


@mutant("A compaction replaces newer deltas instead of going below them.", 6)
def compaction_over_newer(patch: pytest.MonkeyPatch) -> None:
    make, made = compact._Work._make, compact.rewritten
    work: list[Any] = []

    def noted(self: Any, root: Any) -> Any:
        work[:] = [self]
        return make(self, root)

    def over(*args: Any, **more: Any) -> Any:
        return made(*args, **{**more, "deltas": work[0]._entries})

    patch.setattr(compact._Work, "_make", noted)
    patch.setattr(compact, "rewritten", over)


@mutant(
    "A commit takes the read list of the snapshot it began at, undoing a compaction in between.", 3
)
def compaction_merged_into_the_commit(patch: pytest.MonkeyPatch) -> None:
    place = commit._place
    began: dict[bytes, Any] = {}
    first = commit._prepare

    def prepare(context: Any, view: Any, *more: Any) -> Any:
        prepared = first(context, view, *more)
        began[prepared.delta.commit_id] = view
        return prepared

    def stale(context: Any, prepared: Any, parent: Any, *more: Any) -> Any:
        view = began[prepared.delta.commit_id]
        was = parent.snapshot
        base, deltas = view.snapshot.base, view.snapshot.deltas
        parent.snapshot = replace(was, base=base, deltas=deltas)
        try:
            return place(context, prepared, parent, *more)
        finally:
            parent.snapshot = was

    patch.setattr(commit, "_prepare", prepare)
    patch.setattr(commit, "_place", stale)


@mutant("Deltas that are not neighbours become a run, so one goes on top of newer ones.", 5)
def run_of_no_neighbours(patch: pytest.MonkeyPatch) -> None:
    layers_of = compact._layers

    def apart(*args: Any) -> Any:
        return {node: [*found[1:], found[0]] for node, found in layers_of(*args).items()}

    patch.setattr(compact, "_layers", apart)


@mutant("A run omits its deltas' deletions, although the base still has the nodes or chunks.", 60)
def deletions_left_out_of_runs(patch: pytest.MonkeyPatch) -> None:
    layers_of = compact._layers

    def without(*args: Any) -> Any:
        found = layers_of(*args)
        for layers in found.values():
            for i, layer in enumerate(layers):
                kept = [select(table, table.kind != RefKind.UNSET) for table in layer.tables]
                layers[i] = replace(layer, tables=tuple(table for table in kept if len(table)))
        return {node: layers for node, layers in found.items() if any(x.tables for x in layers)}

    patch.setattr(compact, "_layers", without)


@mutant("Deltas are dropped from the read list as soon as there is a base, merged or not.", 124)
def dropped_before_merged(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(compact, "unmerged", lambda *args: iter(()))


# --- the fence, leases, expiry, collection -----------------------------------------------------


@mutant("A session from before the fence can commit.", 3)
def no_fence_check(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(roots, "check_fence", lambda *args: None)


@mutant("A writer continues although another has claimed the branch.", 7)
def claim_not_checked(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(roots, "is_shut_out", lambda *args: False)


@mutant("A compactor continues although another has taken over.", 16)
def zombie_compactor(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(compact, "check_compactor", lambda *args: None)


@mutant("A compaction from before the fence lands.", 0)
def compacted_behind_the_fence(patch: pytest.MonkeyPatch) -> None:
    make = compact._Work._make
    patch.setattr(compact._Work, "_make", lambda self, root: make(self, replace(root, fence=0)))


@mutant("A lease counts by the reader's clock, not by its existence.", 286)
def lease_checked_by_clock(patch: pytest.MonkeyPatch) -> None:
    is_fenced = roots.is_fenced

    def by_clock(roots: Any, root: Any, *args: Any) -> Any:
        now_ms = roots._runtime.now_ms()
        kept = tuple(lease for lease in root.leases if lease.expires_ms > now_ms)
        return is_fenced(roots, replace(root, leases=kept), *args)

    patch.setattr(roots, "is_fenced", by_clock)


@mutant("A collection deletes objects of sessions that hold a lease.", 61)
def leases_not_honoured(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(collect, "leased_lineages", lambda leases: frozenset())


@mutant("An expiry ignores leases.", 0)
def leased_snapshots_expire(patch: pytest.MonkeyPatch) -> None:
    count = collect.kept_count
    patch.setattr(collect, "kept_count", lambda line, kept, leased: count(line, kept, frozenset()))


@mutant("A lease is taken and renewed on an expired snapshot.", 1)
def lease_on_the_expired(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(leases, "locate", lambda *args: None)


@mutant("A session from before the fence takes a lease.", 36)
def lease_behind_the_fence(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(leases, "_check_start", lambda root, session: None)


@mutant("A collection deletes unmarked objects of sessions newer than the fence.", 3)
def collected_beyond_the_fence(patch: pytest.MonkeyPatch) -> None:
    dead = collect.is_dead
    patch.setattr(collect, "is_dead", lambda key, marked, fence, x: dead(key, marked, 1 << 40, x))


@mutant("A collection does not mark the deltas of commits that were compacted since.", 0)
def logs_not_marked(patch: pytest.MonkeyPatch) -> None:
    children = ancestry.children

    def others(value: Any, *, of_page: bool) -> Iterator[Any]:
        log = getattr(value, "log", None)
        listed = {entry.log.key for entry in getattr(value, "deltas", ())}
        for link in children(value, of_page=of_page):
            if log is None or link.kind is not Delta or link.ref.key in listed:
                yield link

    patch.setattr(ancestry, "children", others)


@mutant("A collection does not mark what only tags lead to.", 50)
def tags_not_marked(patch: pytest.MonkeyPatch) -> None:
    live = ancestry.live_snapshots
    patch.setattr(
        collect, "live_snapshots", lambda context, whole: live(context, replace(whole, tags={}))
    )


@mutant("A collection marks from the root before its first swap.", 22)
def marked_too_early(patch: pytest.MonkeyPatch) -> None:
    begin = collect._begin

    def early(context: Any, before: Any, *args: Any, **more: Any) -> Any:
        begun = begin(context, before, *args, **more)
        return replace(begun, branches=before.root.branches, tags=before.root.tags)

    patch.setattr(collect, "_begin", early)


@mutant("A collection deletes without archiving the root it starts from.", 4)
def archive_before_the_deletions_left_out(patch: pytest.MonkeyPatch) -> None:
    begin = collect._begin

    class Unarchived:
        def __init__(self, roots: Any) -> None:
            self.roots = roots

        def __getattr__(self, name: str) -> Any:
            return getattr(self.roots, name)

        def archive(self, at: Any) -> None:
            pass

    def unarchived(context: Any, *args: Any, **more: Any) -> Any:
        return begin(replace(context, roots=Unarchived(context.roots)), *args, **more)

    patch.setattr(collect, "_begin", unarchived)


# --- looking and going back --------------------------------------------------------------------


@mutant("A verification reports damage without checking against the newer root.", 533)
def looked_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(verify, "_has_changed", lambda context, root: False)


@mutant("A verification lists the archives before it reads the root.", 9)
def archives_listed_first(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(verify, "_has_changed", lambda context, root: False)
    patch.setattr(verify, "_first_kept", lambda root: 0)
    root_of, versions_of = verify._root, verify.archived_versions
    listed: list[list[int]] = []

    def after(context: Any, found: Any) -> Any:
        listed[:] = [versions_of(context)]
        return root_of(context, found)

    patch.setattr(verify, "_root", after)
    patch.setattr(verify, "archived_versions", lambda context: listed[0])


@mutant("A recovery keeps fence and leases, so earlier sessions continue.", 2)
def recovered_without_a_fence(patch: pytest.MonkeyPatch) -> None:
    renewed = recover._renewed

    def unfenced(archived: Any, *args: Any) -> Any:
        return replace(renewed(archived, *args), fence=archived.fence, leases=archived.leases)

    patch.setattr(recover, "_renewed", unfenced)


@mutant("A lease is relied on however long ago it was renewed.", 315)
def lease_relied_on_for_ever(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(heartbeat.HeldLease, "is_over", False)


@mutant("A policy function's answer for chunks is reused for attributes.", 887)
def function_asked_once(patch: pytest.MonkeyPatch) -> None:
    choice = rules._choice

    def asked_about_chunks(policy: Any, conflict: Any) -> Any:
        return choice(policy, replace(conflict, chunks=((0,),)))

    patch.setattr(rules, "_choice", asked_about_chunks)


# --- what finds them ---------------------------------------------------------------------------


def run(mutant: Mutant, seed: int) -> Outcome:
    """The seed with the fault put in."""
    with pytest.MonkeyPatch.context() as patch:
        mutant.put_in(patch)
        return simulate(seed, mutant.kinds)


def first_seed(mutant: Mutant) -> int | None:
    """The first seed that finds the fault."""
    found = (seed for seed in range(BUDGET) if run(mutant, seed).failure is not None)
    return next(found, None)


def main() -> None:
    for one in MUTANTS:
        if run(one, one.seed).failure is None:
            print(f"{one.name}: {first_seed(one)}", flush=True)


if __name__ == "__main__":
    main()
