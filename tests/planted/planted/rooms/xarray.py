"""Writing with xarray: values, units, labels, appends, ingested files, and workers."""

from __future__ import annotations

from planted.fault import Fault

FAULTS = [
    # values
    Fault(
        "packed-values-may-be-off-by-the-whole-range",
        "xarray/fit.py",
        "return step * (0.5 + 1e-6) + error * (extent + 2 * offset)",
        "return extent",
    ),
    Fault(
        "times-may-be-off-by-hours",
        "xarray/fit.py",
        'apart = np.abs(one - other) >= np.timedelta64(1, "s")',
        'apart = np.abs(one - other) >= np.timedelta64(1, "D")',
    ),
    Fault(
        "whole-numbers-may-lose-digits-as-floats",
        "xarray/fit.py",
        "(read.real.astype(given.dtype) == given)",
        "(read.real == given.astype(read.dtype))",
    ),
    Fault("texts-may-be-cut", "xarray/fit.py", "else one != other", "else False"),
    Fault(
        "far-dates-are-lost-beside-a-missing-one",
        "xarray/fit.py",
        "if not (_are_far(given, self.attributes) or np.isnat(given).any()):",
        "if True:",
    ),
    Fault(
        "blocks-of-dask-are-not-checked",
        "xarray/fit.py",
        "        self.block(given, codes, start, how)\n",
        "        codes[...] = self._encoded(given.ravel(), how).reshape(given.shape)\n",
    ),
    # what is there
    Fault(
        "any-two-reference-dates-are-the-same",
        "xarray/stored_group.py",
        'found = [str(time) for time in decode_cf_variable("t", numbers).values]',
        "found = []",
    ),
    Fault(
        "no-calendar-is-any-calendar",
        "xarray/stored_group.py",
        'attributes.get("calendar", "standard")',
        '"standard"',
    ),
    Fault(
        "encoded-values-are-taken-for-decoded-ones",
        "xarray/stored_group.py",
        "if key in given and key not in kept:",
        "if False:",
    ),
    Fault(
        "an-append-replaces-the-grid",
        "xarray/stored_group.py",
        "if fixed and in_memory and (variable.dims == (name,) or key in ds.coords):",
        "if False:",
    ),
    Fault(
        "an-append-leaves-arrays-behind",
        "xarray/stored_group.py",
        "(dim == along or new)",
        "new",
    ),
    Fault(
        "a-dimension-may-have-two-lengths",
        "xarray/stored_group.py",
        "(dim == along or new)",
        "dim == along",
    ),
    Fault(
        "what-checks-read-counts-as-read",
        "xarray/stored_group.py",
        "cls(unrecorded(contents_of(store)), path)",
        "cls(contents_of(store), path)",
    ),
    # labels
    Fault(
        "labels-that-exist-are-appended-again",
        "xarray/appended_rows.py",
        'if known.any() and on_existing == "error":',
        "if False:",
    ),
    Fault(
        "one-of-two-equal-labels-is-replaced",
        "xarray/appended_rows.py",
        "    if several.any():\n",
        "    if False:\n",
    ),
    Fault(
        "labels-are-not-compared-on-the-tip",
        "xarray/stored_group.py",
        "if (now.appended, now.replaced) != (planned.appended, planned.replaced):",
        "if False:",
    ),
    Fault(
        "labels-of-a-session-that-changed-them-are-not-compared",
        "xarray/stored_group.py",
        "if not np.array_equal(there.labels(dim, labels)[0], before):",
        "if False:",
    ),
    Fault(
        "the-same-call-twice-makes-two-commits",
        "xarray/writers.py",
        "    if changes_nothing(workspace):\n",
        "    if False:\n",
    ),
    # ingested files
    Fault(
        "a-file-that-changes-while-it-is-read-is-ingested",
        "xarray/source_files.py",
        "if (*_stamp_of(file.url), self.text) != file.stamps:",
        "if False:",
    ),
    Fault(
        "a-file-that-another-ingests-meanwhile-is-ingested-twice",
        "xarray/ingest_files.py",
        "if known[url].stamps == file.stamps:",
        "if False:",
    ),
    Fault(
        "an-older-state-that-another-ingested-is-appended-to",
        "xarray/ingest_files.py",
        "elif url not in self.changed:",
        "elif False:",
    ),
    Fault(
        "a-changed-file-with-more-rows-overwrites-the-next-file",
        "xarray/appended_rows.py",
        "if start is None or (start, file.rows) != before[file.url] or start + file.rows > length:",
        "if start is None:",
    ),
    # workers
    Fault(
        "workers-write-to-the-memory-of-another-process",
        "xarray/array_target.py",
        "if storage.capabilities.shared:",
        "if True:",
    ),
    Fault(
        "tables-of-workers-are-left-out",
        "xarray/array_target.py",
        "for rows in own.tables[node_id]:",
        "for rows in ():",
    ),
]
