"""Serving over HTTP: who may read, what is escaped, and what readers may keep."""

from __future__ import annotations

from planted.fault import Fault

FAULTS = [
    Fault(
        "any-host-name-is-answered",
        "serving/__init__.py",
        "if self._hosts is not None and host not in self._hosts:",
        "if False:",
    ),
    Fault(
        "a-user-name-counts-as-the-token",
        "serving/__init__.py",
        'partition(b":")[2]',
        'partition(b":")[0]',
    ),
    Fault(
        "pages-of-any-origin-may-read",
        "serving/__init__.py",
        "allow_origin_regex=_LOOPBACK_ORIGIN,",
        'allow_origin_regex=".*",',
    ),
    Fault(
        "a-host-that-others-reach-needs-no-token",
        "serving/__init__.py",
        "if not local and token is None:",
        "if False:",
    ),
    Fault(
        "slices-of-changing-files-are-kept",
        "serving/answers.py",
        "if containers_of(self.repo):",
        "if False:",
    ),
    Fault(
        "a-missing-chunk-is-not-found",
        "serving/answers.py",
        "return 503",
        "return 404",
    ),
    Fault(
        "what-a-branch-names-is-kept-for-ever",
        "serving/answers.py",
        '_FOREVER if fixed else "no-cache"',
        "_FOREVER",
    ),
    Fault(
        "a-part-of-another-value-is-continued",
        "serving/answers.py",
        'if "if-range" in request.headers and request.headers["if-range"] != value.etag:',
        "if False:",
    ),
    Fault(
        "large-values-are-sent-unchecked",
        "serving/answers.py",
        "if is_small != is_whole:",
        "if False:",
    ),
    Fault(
        "a-range-ends-a-byte-early",
        "serving/answers.py",
        "int(last) + 1",
        "int(last)",
    ),
    Fault(
        "chunks-of-changing-files-have-an-etag",
        "serving/answers.py",
        "if not source.is_dated:",
        "if False:",
    ),
    Fault(
        "pages-do-not-escape-what-they-show",
        "serving/web_pages.py",
        "autoescape=True,",
        "autoescape=False,",
    ),
    Fault(
        "pages-show-characters-that-disguise",
        "serving/web_pages.py",
        "finalize=_shown,",
        "",
    ),
    Fault(
        "fill-values-are-drawn",
        "serving/answers.py",
        "decode_timedelta=False, **how",
        "decode_timedelta=False, mask_and_scale=False, **how",
    ),
    Fault(
        "a-slice-reads-any-number-of-chunks",
        "serving/answers.py",
        "if math.prod(counts) <= MOST_CHUNKS:",
        "if True:",
    ),
    Fault(
        "a-slice-reads-chunks-of-any-size",
        "serving/answers.py",
        "if size > MOST_CHUNK_BYTES:",
        "if False:",
    ),
    Fault(
        "requests-hold-any-number-of-bytes",
        "serving/answers.py",
        "if value.ref.length > _FEW_BYTES else nullcontext()",
        "if False else nullcontext()",
    ),
]
