"""Object stores: conditions, lost answers, credentials, redirects, and what must not be told."""

from __future__ import annotations

from planted.fault import Fault

FAULTS = [
    Fault(
        "a-swap-in-a-bucket-has-no-condition",
        "storage/object_store.py",
        'mode: Any = "create" if token is None else self._version(token)',
        'mode: Any = "create" if token is None else "overwrite"',
    ),
    Fault(
        "a-contended-creation-counts-as-there",
        "storage/object_store.py",
        'found.kind != "exists" or self._requests.is_contended(found)',
        'found.kind != "exists"',
    ),
    Fault(
        "ranges-are-of-two-versions",
        "storage/object_store.py",
        'if answer.meta["e_tag"] and not tag:',
        "if False:",
    ),
    Fault(
        "a-sync-does-not-miss-objects",
        "storage/object_store.py",
        "if missing:",
        "if False:",
    ),
    Fault(
        "a-store-that-ignores-conditions-is-written-to",
        "storage/object_trial.py",
        "if not isinstance(found, Failure) or found.status == 501:\n            return True",
        "if not isinstance(found, Failure) or found.status == 501:\n            return False",
    ),
    Fault(
        "any-endpoint-is-believed-to-heed-conditions",
        "storage/object_proof.py",
        "return endpoint is None or host.endswith(",
        "return bool(endpoint) or host.endswith(",
    ),
    Fault(
        "any-code-in-an-answer-is-repeated",
        "storage/object_errors.py",
        "codes[0] if codes else None,",
        "next(iter(_CODE.findall(text)), None),",
    ),
    Fault(
        "errors-of-a-filesystem-are-chained",
        "storage/fsspec_files.py",
        'raise StorageError(f"cannot {doing} {where}: {why}")',
        'raise StorageError(f"cannot {doing} {where}: {why}") from failed',
    ),
    Fault(
        "redirects-to-other-hosts-are-followed",
        "storage/object_clients.py",
        'if not options.get("allow_redirects"):',
        "if False:",
    ),
    Fault(
        "a-redirect-may-end-the-encryption",
        "storage/object_clients.py",
        'return allowed and (endpoint or "").startswith("http:")',
        "return allowed",
    ),
    Fault(
        "credentials-are-pickled-under-the-name-of-others",
        "storage/object_credentials.py",
        "if found is not credentials:",
        "if found is None:",
    ),
    Fault(
        "secrets-of-a-client-are-pickled",
        "storage/own_clients.py",
        "if has_secrets(self._store.__getnewargs_ex__()):",
        "if False:",
    ),
    Fault(
        "secrets-of-a-filesystem-are-pickled",
        "storage/fsspec_files.py",
        "if has_secrets(self._given):",
        "if False:",
    ),
    Fault(
        "a-header-may-be-a-secret",
        "storage/url.py",
        "if any(_SECRET_HEADER.fullmatch(name) for name in value):",
        "if False:",
    ),
    Fault(
        "a-lock-of-another-writer-is-ignored",
        "storage/fsspec_writer.py",
        "if there is not None and age_s < _STALE_S:",
        "if False:",
    ),
    Fault(
        "a-writer-that-lost-its-lock-goes-on",
        "storage/fsspec_writer.py",
        "if self._epoch and not self._is_owner(there):",
        "if False:",
    ),
    Fault(
        "two-take-a-free-lock-at-once",
        "storage/fsspec_writer.py",
        "if not self._is_owner(taken):",
        "if False:",
    ),
    Fault(
        "a-lost-race-of-swaps-proves-nothing",
        "storage/fsspec_proven.py",
        'return "" if sum(isinstance(token, str) for token in swapped) == 1 else "If-Match"',
        'return ""',
    ),
]
