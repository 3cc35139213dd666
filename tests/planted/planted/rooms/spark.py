"""Spark: options, plans, tasks, rows as cells, leases and streams."""

from __future__ import annotations

from planted.fault import Fault

FAULTS = [
    Fault(
        "unknown-options-are-passed-over",
        "spark/data_source.py",
        'faults.append(f"option {name[:64]!r} is unknown: {advice}")',
        "pass",
    ),
    Fault(
        "options-may-contradict-each-other",
        "spark/data_source.py",
        "        if {*pair} <= texts.keys():\n",
        "        if False:\n",
    ),
    Fault(
        "options-that-say-what-to-read-are-dropped-by-a-write",
        "spark/data_source.py",
        "    if reads:\n",
        "    if False:\n",
    ),
    Fault(
        "a-double-is-a-label-beyond-its-precision",
        "spark/cell_writer.py",
        "if not _same_numbers(whole, labels).all():",
        "if False:",
    ),
    Fault(
        "far-dates-are-lost-beside-null",
        "spark/cell_writer.py",
        "self.fit.check_beside(values, codes, lambda: self.absent)",
        "pass",
    ),
    Fault(
        "one-of-two-rows-of-a-cell-counts-unasked",
        "spark/cell_writer.py",
        "        if again.any():\n",
        "        if False:\n",
    ),
    Fault(
        "rows-outside-the-region-are-written-elsewhere",
        "spark/cell_writer.py",
        "if not inside.all():",
        "if False:",
    ),
    Fault(
        "a-task-reads-elsewhere-with-the-containers-of-another-job",
        "spark/worker.py",
        "place = (place_of(job.storage), job.containers, job.snapshot_id)",
        "place = (place_of(job.storage), (), job.snapshot_id)",
    ),
    Fault(
        "late-tasks-renew-no-lease",
        "spark/job.py",
        "            self.left()\n",
        "            pass\n",
    ),
    Fault(
        "a-stream-goes-on-behind-a-reset",
        "spark/stream.py",
        "if lost is not None and not (cut and lost.written_at < oldest.written_at):",
        "if False:",
    ),
    Fault(
        "a-stream-passes-over-what-was-overwritten",
        "spark/stream.py",
        "if not cells.only_added:",
        "if False:",
    ),
]
