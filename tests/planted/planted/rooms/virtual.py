"""Files elsewhere: what may be read, whether it is still the same, and what an import may take."""

from __future__ import annotations

from planted.fault import Fault

FAULTS = [
    Fault(
        "a-container-holds-folders-beside-it",
        "virtual/containers.py",
        'path.startswith(root.rstrip("/") + "/")',
        "path.startswith(root)",
    ),
    Fault(
        "saved-containers-need-no-authorization",
        "virtual/containers.py",
        "authorize = known if authorize else ()",
        "authorize = known",
    ),
    Fault(
        "a-name-may-lead-to-this-machine",
        "virtual/containers.py",
        'and _leads_to_local(path.partition("/")[0])',
        "and False",
    ),
    Fault(
        "links-lead-out-of-a-container",
        "storage/disk.py",
        "real = os.path.realpath(inside + path, strict=True)",
        "return open_regular(inside + path, follow_links=True)",
    ),
    Fault(
        "a-signed-url-is-kept",
        "virtual/containers.py",
        'if scheme in REMOTE and ("?" in rest or "#" in rest):',
        "if False:",
    ),
    Fault(
        "a-file-of-another-size-is-read",
        "virtual/virtual_refs.py",
        "sized = known.nbytes is None or found.nbytes == known.nbytes",
        "sized = True",
    ),
    Fault(
        "a-file-of-another-etag-is-read",
        "virtual/virtual_refs.py",
        "found.etag is not None and plain_etag(found.etag) == plain_etag(known.tag)",
        "True",
    ),
    Fault(
        "a-file-that-is-newer-than-its-reference-is-read",
        "virtual/virtual_refs.py",
        "now is not None and now <= since_ms // unit_ms",
        "True",
    ),
    Fault(
        "a-file-that-ends-early-is-read-as-far-as-it-goes",
        "virtual/virtual_refs.py",
        "if ref.length and len(data) == length and",
        "if ref.length and",
    ),
    Fault(
        "checksums-of-files-elsewhere-are-not-compared",
        "virtual/virtual_refs.py",
        "crc32c(data) == due):",
        "True):",
    ),
    Fault(
        "linked-folders-are-imported",
        "storage/local.py",
        "elif entry.is_file(follow_symlinks=False):",
        "elif True:",
    ),
    Fault(
        "documents-that-are-listed-and-missing-are-left-out",
        "virtual/references.py",
        "if place not in values:",
        "if False:",
    ),
    Fault(
        "an-import-goes-over-what-is-there",
        "importing.py",
        "for other in workspace.contents.within(path):",
        "for other in ():",
    ),
    Fault(
        "references-that-no-array-reads-are-taken-in",
        "importing.py",
        "if references.fetch is None:",
        "if False:",
    ),
    Fault(
        "what-parquet-unpacks-to-is-not-counted",
        "virtual/kerchunk.py",
        'check_bytes("what it unpacks to", stated, place.max_bytes)',
        "pass",
    ),
    Fault(
        "rows-beyond-an-array-are-left-out",
        "virtual/kerchunk.py",
        "if raw is None and url is None:",
        "if row >= end or (raw is None and url is None):",
    ),
    Fault(
        "what-an-icechunk-file-unpacks-to-is-not-bounded",
        "virtual/icechunk_files.py",
        "if not 0 <= nbytes <= self._max_bytes:",
        "if False:",
    ),
    Fault(
        "chunks-that-are-gone-in-icechunk-stay",
        "importing.py",
        "if len(gone):",
        "if False:",
    ),
    Fault(
        "files-that-changed-since-icechunk-noted-them-are-read",
        "virtual/icechunk_files.py",
        'changed = getattr(error, "kind", "") == "virtual-chunk-modified"',
        "changed = False",
    ),
    Fault(
        "files-that-had-changed-are-not-looked-at-for-a-later-snapshot",
        "virtual/icechunk_files.py",
        "kept = self._settled if file.unchanged_since_ms < 0 else now",
        "kept = self._settled",
    ),
    Fault(
        "icechunk-reads-where-its-repository-says",
        "virtual/icechunk_files.py",
        "config.set_virtual_chunk_container(given)",
        "pass",
    ),
]
