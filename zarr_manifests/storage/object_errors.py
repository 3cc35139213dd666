"""Errors of an object store's client, translated to errors of this package.

Invariant: no text of the client is passed on. It contains addresses, some with signed queries, and
whatever the server sent, which may repeat keys and tokens. Only the kind of the failure, the
status, and a known error code are passed on.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from zarr_manifests.errors import (
    ManifestsError,
    ObjectNotFoundError,
    StorageError,
    StorageFullError,
    UnsupportedStorageError,
)
from zarr_manifests.storage.object_clients import refused_host
from zarr_manifests.storage.object_credentials import FAULTS

__all__ = ["Failure", "failure_of", "storage_error"]

_STATUS: Final = re.compile(r"status code: (\d{3})\b")
_CODE: Final = re.compile(r"<Code>([A-Za-z]{1,60})</Code>")
_REDIRECT: Final = re.compile(
    r'kind: Redirect.*?url: "https?://([A-Za-z0-9._:\[\]-]{1,255})', re.DOTALL
)
_READ_CHARS: Final = 100_000

_CREDENTIALS: Final = (
    "give credentials by a function, from_url(..., credentials=...), by the variables of the "
    "environment that are the provider's own (on S3 AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and, "
    "if there is one, AWS_SESSION_TOKEN) or by the role of the machine; anonymous=True reads what "
    "is public"
)
_BUCKET: Final = "make the bucket, or correct its name, the endpoint or the account"
_REGION: Final = "the bucket is in another region: give the one it is in, region=..."
_MOVED: Final = (
    "the store sends to another address: give that one, or the region that the bucket is in"
)
_FULL: Final = "make room there, or raise its quota, then try again"
_RIGHTS: Final = (
    "these credentials do not allow it here; reading takes the rights to get and to list objects, "
    "writing those to put and to delete them as well"
)
_LARGE: Final = "one object cannot be as large there; make the chunks smaller"
_SLOWER: Final = "the store asks for fewer requests; try again later"
_SAID: Final = {
    _BUCKET: ("NoSuchBucket", "ContainerNotFound", "InvalidBucketName"),
    _REGION: (
        "PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException",
    ),
    _CREDENTIALS: (
        "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken",
        "AuthenticationFailed",
    ),
    _RIGHTS: (
        "AccessDenied", "AllAccessDisabled", "AuthorizationFailure",
        "AuthorizationPermissionMismatch",
    ),
    _FULL: (
        "QuotaExceeded", "XMinioStorageFull", "XMinioStorageQuotaExceeded",
        "XMinioAdminBucketQuotaExceeded",
    ),
    _LARGE: ("EntityTooLarge",),
    _SLOWER: ("SlowDown",),
    "try again later": ("ServiceUnavailable", "InternalError"),
    "set the clock of this machine": ("RequestTimeTooSkewed",),
    "the store does not know this request": ("NotImplemented",),
    "somebody else writes the same object; try again": ("ConditionalRequestConflict",),
    "": ("NoSuchKey", "InvalidRange", "PreconditionFailed"),
}  # fmt: skip
_HINTS: Final = {code: hint for hint, codes in _SAID.items() for code in codes}
_BY_STATUS: Final = {
    **dict.fromkeys((301, 302, 303, 307, 308), _MOVED),
    401: _CREDENTIALS,
    403: _RIGHTS,
    413: _LARGE,
    429: _SLOWER,
    507: _FULL,
}
_UNANSWERED: Final = "; check the endpoint and the network"
_SAYS: Final = {
    "credentials": f"no credentials were found; {_CREDENTIALS}",
    "elsewhere": _REGION,
    "whole": "the server has no byte ranges, and answers with the whole object; use a server that "
    "has them, or copy what is there",
    "unreachable": f"the store cannot be reached{_UNANSWERED}",
    "timeout": f"the store did not answer in time{_UNANSWERED}",
    "cut": f"the store broke the connection off before its answer was whole{_UNANSWERED}",
}


@dataclass(frozen=True, slots=True)
class Failure:
    """The kind of a failure, without any text of the client or the server.

    Parameters
    ----------
    kind : str
        `"absent"`, `"exists"`, `"changed"`, `"contended"` (another request to the same object was
        running, so it may not exist), `"beyond"` (the range begins where the object has ended),
        `"credentials"`, `"unreachable"`, `"timeout"`, `"cut"` (the connection ended before the
        answer), `"elsewhere"` (in another region), `"redirected"`, `"whole"` (it has no byte
        ranges), `"provider"` (of credentials) or `"other"`.
    status : int, optional
        The status of the answer, if there was one.
    code : str
        The error code in the answer, if it is a known one.
    detail : str
        The host of a redirect, if known, or what was wrong with the provider of credentials.
    """

    kind: str
    status: int | None = None
    code: str = ""
    detail: str = ""


def failure_of(error: BaseException, store: str) -> Failure:
    """Classify an error of the client of that kind of store; one of this package is raised."""
    if isinstance(error, ManifestsError):
        raise error
    text = str(error)[:_READ_CHARS]
    own = text.partition("Server returned")[0]  # the client's own words
    found = _STATUS.search(text)
    status = int(found[1]) if found else None
    code = next((code for code in _CODE.findall(text) if code in _HINTS), "")
    fault = next((fault for fault in FAULTS.values() if fault in own), "")
    if fault:
        return Failure("provider", status, code, fault)
    name, no_answer, no_bucket = type(error).__name__, status is None, _HINTS.get(code) == _BUCKET
    # The first that fits.
    kinds = {
        "contended": status == 409 and store == "s3",
        "exists": name == "AlreadyExistsError",
        "changed": name == "PreconditionError" and not no_bucket,
        "absent": (isinstance(error, FileNotFoundError) or status == 410) and not no_bucket,
        # Some servers answer a range that begins at the end of the object; the client refuses that.
        "beyond": status == 416 or "StartTooLarge {" in own,
        "whole": "Range request not supported" in text or "non-partial response when range" in text,
        "credentials": "//169.254.169.254/" in own
        or "token request" in own
        or "/api/token " in own,
        "redirected": status == 421 or "TunnelUnsuccessful" in own or "kind: Redirect" in own,
        "elsewhere": "redirect without LOCATION" in own,
        "timeout": no_answer and ("kind: Timeout" in text or "TimedOut" in text),
        "cut": no_answer and "kind: Interrupted" in text,
        "unreachable": no_answer
        and ("kind: Connect" in text or "error sending request" in text or "kind: Request" in text),
    }
    to = _REDIRECT.search(own)
    kind = next((kind for kind, fits in kinds.items() if fits), "other")
    host = to[1] if to else refused_host() if kind == "redirected" else ""
    return Failure(kind, status, code, host)


def storage_error(failure: Failure, doing: str, key: str, url: str) -> StorageError:
    """The error to raise: the action, the object, the reason, and what to do about it."""
    if failure.kind == "absent":
        return ObjectNotFoundError(f"there is no object {key!r} in {url}")
    said = " ".join(filter(None, [str(failure.status or ""), failure.code]))
    hint = _HINTS.get(failure.code) or _BY_STATUS.get(failure.status or 0, "")
    why = f"the store refused ({said})" if said else "the client of the store failed"
    why += f": {hint}" if hint else ""
    kind: type[StorageError] = StorageError
    if failure.kind == "provider":
        why = failure.detail
    elif failure.kind == "redirected":
        why = (
            f"the store sends to another host, {failure.detail}, which was not asked: use the "
            "address that it sends to, or, for a web server, from_url(..., allow_redirects=True)"
        )
    elif failure.kind in _SAYS:
        why = _SAYS[failure.kind]
        kind = UnsupportedStorageError if failure.kind == "whole" else StorageError
    elif hint == _FULL:
        kind = StorageFullError
    elif failure.code == "NotImplemented" or failure.status == 501:
        kind = UnsupportedStorageError
    return kind(f"cannot {doing} {f'{key!r} in {url}' if key else url}: {why}")
