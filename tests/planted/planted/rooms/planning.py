"""Layouts, chunk tables, scans, cells, zone maps, and which changes conflict."""

from __future__ import annotations

from planted.fault import Fault

FAULTS = [
    Fault(
        "chunks-beside-another-encoding",
        "planning/conflict.py",
        "    _C: (_X, _D),\n",
        "    _C: (_D,),\n",
    ),
    Fault(
        "a-group-deleted-under-new-nodes",
        "planning/conflict.py",
        '        (_D, mine.left, theirs.taken, "was made"),\n',
        "",
    ),
    Fault(
        "fill-values-are-no-structure",
        "planning/components.py",
        '        "_FillValue",\n',
        "",
    ),
    Fault(
        "nodes-below-arrays",
        "planning/conflict.py",
        "    yield from _below_arrays(mine, theirs)\n",
        "",
    ),
    Fault(
        "arrays-made-twice-are-one",
        "planning/conflict.py",
        "return made and same_group(a.after, b.after)",
        "return made",
    ),
    Fault(
        "true-and-1-are-the-same",
        "planning/components.py",
        "_canonical(was) != _canonical(now):",
        "was != now:",
    ),
    Fault(
        "merged-attributes-lose-mine",
        "planning/components.py",
        "found = (mine if key in ours else theirs)",
        "found = (mine if key in ours and key in base else theirs)",
    ),
    Fault(
        "equal-checksums-are-equal-chunks",
        "planning/conflict.py",
        "by_place = any(",
        "by_place = len(arrays) > 2 and any(",
    ),
    Fault(
        "reads-that-were-cut-off-ignored",
        "planning/conflict.py",
        "if change.cut is not None and reads.beyond(node_id, change.cut):",
        "if change.cut is not None and not reads:",
    ),
    Fault(
        "appends-of-different-lengths-relocated",
        "planning/appends.py",
        "(spans[o] for o in near[group]))) > 1}",
        "(spans[o] for o in near[group]))) > 9}",
    ),
    Fault(
        "replaced-rows-go-to-other-labels",
        "xarray/appended_rows.py",
        "rows, at = rows[np.argsort(at)], np.sort(at)",
        "at = np.sort(at)",
    ),
    Fault(
        "the-oldest-row-wins",
        "planning/merge.py",
        "np.not_equal(linear[1:], linear[:-1], out=last[:-1])",
        "np.not_equal(linear[1:], linear[:-1], out=last[1:])",
    ),
    Fault(
        "cut-off-chunks-come-back",
        "planning/merge.py",
        "tables = [cut_off(table, layer.truncated) for table in tables]",
        "tables = [*tables]",
    ),
    Fault(
        "chunks-moved-onto-each-other",
        "planning/regions.py",
        "    if len(clash):",
        "    if len(clash) > len(kept):",
    ),
    Fault(
        "requests-longer-than-allowed",
        "storage/protocol.py",
        "most = max(start + span_bytes, int(reach[first]))",
        "most = max(start + 2 * span_bytes, int(reach[first]))",
    ),
    Fault(
        "large-manifests-are-preloaded",
        "engine/read_ahead.py",
        "if refs <= options.max_manifest_size and any(",
        "if any(",
    ),
    Fault(
        "more-manifests-than-a-set-may-have",
        "planning/packing.py",
        "room = max(0, one.cardinality - stay)",
        "room = max(0, one.cardinality)",
    ),
    Fault(
        "what-lies-together-is-parted",
        "planning/packing.py",
        "        if layouts[node_id].together:",
        "        if not layouts:",
    ),
    Fault(
        "fewer-tasks-than-asked-for", "planning/scan.py", "if too_few(target):", "if not wanted:"
    ),
    Fault(
        "labels-that-come-twice-accepted",
        "planning/scan.py",
        "        if not ascending.is_unique:",
        "        if ascending.empty:",
    ),
    Fault(
        "unmeasured-chunks-left-out",
        "planning/skipping.py",
        "return found | ~ranges.known",
        "return found & ranges.known",
    ),
    Fault(
        "entries-of-other-chunks-count",
        "planning/merge.py",
        "    same &= inline | (a.offset[mine] == b.offset[its])\n",
        "",
    ),
    Fault(
        "nan-is-added-up",
        "planning/measure.py",
        "        absent.append(np.isnan(values))\n",
        "        absent.append(np.zeros(values.shape, np.bool_))\n",
    ),
    Fault(
        "marks-of-missing-values-change-nothing",
        "planning/meaning.py",
        '_ATTRIBUTES: Final = ("_FillValue", "missing_value", ',
        '_ATTRIBUTES: Final = ("_FillValue", ',
    ),
]
