"""Layouts, chunk tables, scans, cells, zone maps, and which changes conflict."""

from __future__ import annotations

from planted.fault import Fault

FAULTS = [
    Fault(
        "chunks-beside-another-encoding",
        "planning/conflict/decide.py",
        "    _C: (_X, _D),\n",
        "    _C: (_D,),\n",
    ),
    Fault(
        "a-group-deleted-under-new-nodes",
        "planning/conflict/decide.py",
        '        (_D, mine.left, theirs.taken, "was made"),\n',
        "",
    ),
    Fault(
        "fill-values-are-no-structure",
        "planning/conflict/components.py",
        '        "_FillValue",\n',
        "",
    ),
    Fault(
        "nodes-below-arrays",
        "planning/conflict/decide.py",
        "    yield from _below_arrays(mine, theirs)\n",
        "",
    ),
    Fault(
        "arrays-made-twice-are-one",
        "planning/conflict/decide.py",
        "return made and same_group(a.after, b.after)",
        "return made",
    ),
    Fault(
        "true-and-1-are-the-same",
        "planning/conflict/components.py",
        "_canonical(was) != _canonical(now):",
        "was != now:",
    ),
    Fault(
        "merged-attributes-lose-mine",
        "planning/conflict/components.py",
        "or (key in ours and not both):",
        "or (key in ours and not both and key in base):",
    ),
    Fault(
        "equal-checksums-are-equal-chunks",
        "planning/conflict/decide.py",
        "by_place = any(",
        "by_place = len(arrays) > 2 and any(",
    ),
    Fault(
        "reads-that-were-cut-off-ignored",
        "planning/conflict/decide.py",
        "if change.cut is not None and reads.beyond(node_id, change.cut):",
        "if change.cut is not None and not reads:",
    ),
    Fault(
        "appends-of-different-lengths-relocated",
        "planning/conflict/appends.py",
        "(spans[o] for o in near[group]))) > 1}",
        "(spans[o] for o in near[group]))) > 9}",
    ),
    Fault(
        "replaced-rows-go-to-other-labels",
        "planning/conflict/appends.py",
        "rows, at = rows[np.argsort(at)], np.sort(at)",
        "at = np.sort(at)",
    ),
    Fault(
        "the-oldest-row-wins",
        "planning/tables/merge.py",
        "np.not_equal(linear[1:], linear[:-1], out=last[:-1])",
        "np.not_equal(linear[1:], linear[:-1], out=last[1:])",
    ),
    Fault(
        "cut-off-chunks-come-back",
        "planning/tables/merge.py",
        "tables = [_cut_off(table, layer.truncated) for table in tables]",
        "tables = [*tables]",
    ),
    Fault(
        "chunks-moved-onto-each-other",
        "planning/tables/regions.py",
        "    if len(clash):",
        "    if len(clash) > len(kept):",
    ),
    Fault(
        "requests-longer-than-allowed",
        "planning/tables/regions.py",
        "most = max(start + span_bytes, int(reach[first]))",
        "most = max(start + 2 * span_bytes, int(reach[first]))",
    ),
    Fault(
        "large-manifests-are-preloaded",
        "engine/snapshot/read_ahead.py",
        "if refs <= options.max_manifest_size and any(",
        "if any(",
    ),
    Fault(
        "more-manifests-than-a-set-may-have",
        "planning/layout/packing.py",
        "room = max(0, one.cardinality - stay)",
        "room = max(0, one.cardinality)",
    ),
    Fault(
        "what-lies-together-is-parted",
        "planning/layout/packing.py",
        "            if layouts[node_id].together:",
        "            if not layouts:",
    ),
    Fault(
        "fewer-tasks-than-asked-for", "planning/scan.py", "if too_few(target):", "if not wanted:"
    ),
    Fault(
        "labels-that-come-twice-accepted",
        "planning/scan.py",
        "        if again.size:",
        "        if again.size > len(labels):",
    ),
    Fault(
        "unmeasured-chunks-left-out",
        "planning/zones/skipping.py",
        "return found | ~ranges.known",
        "return found & ranges.known",
    ),
    Fault(
        "entries-of-other-chunks-count",
        "planning/zones/meaning.py",
        '_COMPARED: Final = ("kind", "source", "number", "offset", "length", "crc32c")',
        '_COMPARED: Final = ("kind", "source", "number", "length", "crc32c")',
    ),
    Fault(
        "nan-is-added-up",
        "planning/zones/measure.py",
        "        if has_nan or any(low <= mark <= high for mark in marks):",
        "        if any(low <= mark <= high for mark in marks):",
    ),
    Fault(
        "marks-of-missing-values-change-nothing",
        "planning/zones/meaning.py",
        '_ATTRIBUTES: Final = ("_FillValue", "missing_value", ',
        '_ATTRIBUTES: Final = ("_FillValue", ',
    ),
    Fault(
        "turned-comparisons-stay",
        "planning/zones/where.py",
        "return self._made(start, self._column(), _TURNED[_SYMBOLS[op]], value)",
        "return self._made(start, self._column(), _SYMBOLS[op], value)",
    ),
]
