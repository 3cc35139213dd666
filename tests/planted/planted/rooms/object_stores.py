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
        "storage/object_clients.py",
        '"contended": status == 409 and store == "s3",',
        '"contended": False,',
    ),
    Fault(
        "a-sync-does-not-miss-objects",
        "storage/object_store.py",
        "if missing:",
        "if False:",
    ),
    Fault(
        "a-store-that-ignores-conditions-is-written-to",
        "storage/object_store.py",
        "self._made_probe = True\n            return True",
        "self._made_probe = True\n            return False",
    ),
    Fault(
        "any-endpoint-is-believed-to-heed-conditions",
        "storage/object_clients.py",
        "promised = endpoint is None or host.endswith(",
        "promised = bool(endpoint) or host.endswith(",
    ),
    Fault(
        "any-code-in-an-answer-is-repeated",
        "storage/object_clients.py",
        'code = next((code for code in _CODE.findall(text) if code in _HINTS), "")',
        'code = next(iter(_CODE.findall(text)), "")',
    ),
    Fault(
        "text-of-a-filesystem-is-passed-on",
        "storage/fsspec_store.py",
        'why = f"the filesystem failed with a {type(failed).__name__}"',
        'why = f"the filesystem failed: {failed}"',
    ),
    Fault(
        "a-forked-child-waits-forever",
        "storage/object_clients.py",
        "if _FORKED:",
        "if False:",
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
        "storage/object_clients.py",
        "if found is not credentials:",
        "if found is None:",
    ),
    Fault(
        "secrets-of-a-client-are-pickled",
        "storage/object_clients.py",
        "if self.store is not None and has_secrets(self.store.__getnewargs_ex__()):",
        "if False:",
    ),
    Fault(
        "secrets-of-a-filesystem-are-pickled",
        "storage/fsspec_store.py",
        "if has_secrets([fs.storage_args, fs.storage_options]):",
        "if False:",
    ),
    Fault(
        "a-header-may-be-a-secret",
        "storage/url.py",
        "if any(_SECRET_HEADER.fullmatch(name) for name in value):",
        "if False:",
    ),
    Fault(
        "a-lost-race-of-swaps-proves-nothing",
        "storage/object_store.py",
        "if len(won) != 1:",
        "if len(won) != 1 and token is None:",
    ),
]
