"""Texts, names, grids, versions, times, progress, and the decoding of chunks."""

from __future__ import annotations

from planted.fault import Fault

FAULTS = [
    Fault("no-near-names-are-told", "texts.py", "most: int = 1, cutoff", "most: int = 0, cutoff"),
    Fault(
        "boxes-beyond-64-bits-allowed",
        "grid.py",
        "if size >= MAX_BOX_CHUNKS:",
        "if size >= MAX_BOX_CHUNKS**2:",
    ),
    Fault(
        "a-box-reaches-one-too-far",
        "grid.py",
        "all(map(lt, coords, self.hi))",
        "all(map(le, coords, self.hi))",
    ),
    Fault("two-keys-of-one-chunk", "keys.py", 'r"(0|[1-9][0-9]{0,18})"', 'r"([0-9]{1,19})"'),
    Fault(
        "pointers-lead-anywhere",
        "ids.py",
        '_KEY = re.compile(r"[a-z]+/',
        '_KEY = re.compile(r"[a-z./]+/',
    ),
    Fault(
        "short-ids-are-ambiguous",
        "versions.py",
        "digits if counts[digits] == 1 else each",
        "digits if counts[digits] else each",
    ),
    Fault("one-step-back-stays", "versions.py", "int(step or 1)", "int(step or 0)"),
    Fault(
        "negative-ages-accepted",
        "versions.py",
        "isinstance(duration, timedelta) and duration >= timedelta(0)",
        "isinstance(duration, timedelta)",
    ),
    Fault(
        "checksums-of-parts-not-compared",
        "decoding.py",
        'if sums != b"".join([data[-_CRC_BYTES:] for data in chunks]):',
        "if len(sums) > 4 * len(chunks):",
    ),
    Fault(
        "overlapping-parts-are-copied",
        "decoding.py",
        "if length.sum() > len(shard):",
        "if length.sum() < 0:",
    ),
    Fault(
        "conflicts-show-control-characters",
        "errors.py",
        'return plain_text(f"{self.path}: {self.component}{where}: {self.reason}")',
        'return f"{self.path}: {self.component}{where}: {self.reason}"',
    ),
    Fault(
        "direction-marks-are-shown",
        "errors.py",
        'unicodedata.category(char) == "Zs"',
        'unicodedata.category(char) in ("Zs", "Cf")',
    ),
    Fault(
        "told-before-it-is-done",
        "progress.py",
        "        yield item\n        tell(stage, done)",
        "        tell(stage, done)\n        yield item",
    ),
    Fault(
        "a-name-is-compared-with-all-names",
        "texts.py",
        "get_close_matches(name, names, most, cutoff)",
        "get_close_matches(name, list(known), most, cutoff)",
    ),
]
