"""Choosing chunks by their statistics, decoding them, and comparing values."""

from __future__ import annotations

from planted.fault import Fault

FAULTS = [
    Fault(
        "bounds-of-a-negative-scale-are-the-wrong-way-round",
        "selecting.py",
        "low, high = np.minimum(one, other), np.maximum(one, other)",
        "low, high = one, other",
    ),
    Fault(
        "rounded-times-are-taken-for-exact-bounds",
        "selecting.py",
        "low, high = low - _US, high + _US",
        "pass",
    ),
    Fault(
        "cells-that-an-array-has-grown-by-are-within-the-bounds",
        "selecting.py",
        "known = hold & (~bounded",
        "known = (~bounded",
    ),
    Fault(
        "counts-of-grown-chunks-count",
        "selecting.py",
        "bounds.clip == clips(coords, meta.shape, meta.chunk_shape)",
        "bounds.clip >= 0",
    ),
    Fault(
        "sums-of-chunks-that-are-clipped-anew-count",
        "summarizing.py",
        'counts = self._are("whole", coords) & (bounds.clip == clip) & ~_unknown(bounds.sums)',
        'counts = self._are("whole", coords) & ~_unknown(bounds.sums)',
    ),
    Fault(
        "sums-by-other-weights-count",
        "summarizing.py",
        "        its = bounds.weighted_by(digest)\n",
        "        its = bounds\n",
    ),
    Fault(
        "a-whole-leaf-is-answered-chunk-by-chunk",
        "selecting.py",
        "region, pages) if due[i]]",
        "region, pages) if False]",
    ),
    Fault(
        "a-leaf-answers-for-several-groups",
        "summarizing.py",
        "            and len({*axis.code[lo:hi].tolist()}) == 1\n",
        "",
    ),
    Fault(
        "a-leaf-answers-for-cells-that-were-cut-off",
        "summarizing.py",
        "            hi * chunk <= size\n            and bool",
        "            bool",
    ),
    Fault(
        "chunks-that-are-not-stored-have-no-cells",
        "summarizing.py",
        "        self._add_fill()\n",
        "",
    ),
    Fault(
        "a-dataset-answers-without-its-values-being-decoded",
        "xarray/backend.py",
        "    if not decodes and marks:",
        "    if False:",
    ),
    Fault(
        "a-dataset-that-was-computed-is-summarized",
        "xarray/backend.py",
        "        if len(graph.layers) != 2 or len(read) != 1:",
        "        if len(read) != 1:",
    ),
    Fault(
        "large-sums-wrap-around",
        "summarizing.py",
        '            if sums.dtype.kind == "i" and (sums == NO_SUM).any():',
        "            if False:",
    ),
    Fault(
        "bounds-of-another-packing-count",
        "engine/zones.py",
        "if (zones.meaning, zones.bounds.low.dtype) == (meaning.digest, meaning.dtype)",
        "if zones.bounds.low.dtype == meaning.dtype",
    ),
    Fault(
        "bounds-count-for-a-chunk-that-was-replaced",
        "engine/zones.py",
        "kept := taken(zones, valid(zones, table))",
        "kept := zones",
    ),
    Fault(
        "bounds-of-pages-count-for-chunks-that-have-changed",
        "planning/tables.py",
        "return table is not None and table.box.overlaps(box) and bool(in_box(table, box).any())",
        "return False",
    ),
    Fault(
        "missing-values-are-counted-as-before-an-array-grew",
        "selecting.py",
        "return Ranges(low, high, bounded, nulls, hold)",
        "return Ranges(low, high, bounded, nulls, np.ones(len(bounds), np.bool_))",
    ),
    Fault(
        "chunks-that-a-writer-has-planned-with-do-not-count-as-read",
        "selecting.py",
        "if not (pages and region.size and note_unchanged(self.contents, node, region)):",
        "if not (pages and region.size):",
    ),
    Fault(
        "a-range-of-times-ends-with-the-first-instant-of-its-last-period",
        "planning/skipping.py",
        "most = None if last is None else scalar(last, last=labels)",
        "most = None if last is None else scalar(last)",
    ),
    Fault(
        "nan-is-equal-to-every-number",
        "planning/skipping.py",
        '_ABOVE_NAN: Final = (">", ">=", "!=")',
        '_ABOVE_NAN: Final = (">", ">=")',
    ),
    Fault(
        "blosc-reads-what-lies-behind-a-chunk",
        "decoding.py",
        "        if stored > len(data):\n",
        "        if False:\n",
    ),
    Fault(
        "another-fill-value-changes-no-cell",
        "value_changes.py",
        "if _fill(was) != _fill(now) or was.array_meta.chunk_shape != now.array_meta.chunk_shape:",
        "if was.array_meta.chunk_shape != now.array_meta.chunk_shape:",
    ),
]
