"""Errors of an object store's client, translated to errors of this package.

Invariant: no text of the client is passed on. It contains addresses, some with signed queries, and
whatever the server sent, which may repeat keys and tokens. Only the kind of the failure, the
status, and a known error code are passed on.
"""

from __future__ import annotations

import re
from typing import Final

from zarr_manifests.error_cases import (
    ObjectNotFoundError,
    StorageFullError,
    UnsupportedStorageError,
)
from zarr_manifests.errors import StorageError
from zarr_manifests.records import dataclass
from zarr_manifests.storage.object_credentials import FAILED, FAULTS

__all__ = ["Failure", "failure_of", "storage_error"]

_STATUS: Final = re.compile(r"status code: (\d{3})\b")
_CODE: Final = re.compile(r"<Code>([A-Za-z]{1,60})</Code>")
_REDIRECT: Final = re.compile(
    r'kind: Redirect.*?url: "https?://([A-Za-z0-9._:\[\]-]{1,255})', re.DOTALL
)
_PROVIDED: Final = re.compile(re.escape(FAILED) + r"([a-z-]+)")
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
_CLOCK: Final = "set the clock of this machine"
_FULL: Final = "make room there, or raise its quota, then try again"
_RIGHTS: Final = (
    "these credentials do not allow it here; reading takes the rights to get and to list objects, "
    "writing those to put and to delete them as well"
)
_HINTS: Final = {
    "NoSuchBucket": _BUCKET,
    "ContainerNotFound": _BUCKET,
    "InvalidBucketName": _BUCKET,
    "PermanentRedirect": _REGION,
    "AuthorizationHeaderMalformed": _REGION,
    "IllegalLocationConstraintException": _REGION,
    "InvalidAccessKeyId": _CREDENTIALS,
    "SignatureDoesNotMatch": _CREDENTIALS,
    "ExpiredToken": _CREDENTIALS,
    "InvalidToken": _CREDENTIALS,
    "AuthenticationFailed": _CREDENTIALS,
    "AccessDenied": _RIGHTS,
    "AllAccessDisabled": _RIGHTS,
    "AuthorizationFailure": _RIGHTS,
    "AuthorizationPermissionMismatch": _RIGHTS,
    "RequestTimeTooSkewed": _CLOCK,
    "QuotaExceeded": _FULL,
    "XMinioStorageFull": _FULL,
    "XMinioStorageQuotaExceeded": _FULL,
    "XMinioAdminBucketQuotaExceeded": _FULL,
    "EntityTooLarge": "one object cannot be as large there; make the chunks smaller",
    "SlowDown": "the store asks for fewer requests; try again later",
    "ServiceUnavailable": "try again later",
    "InternalError": "try again later",
    "NotImplemented": "the store does not know this request",
    "NoSuchKey": "",
    "ConditionalRequestConflict": "somebody else writes the same object; try again",
    "InvalidRange": "",
    "PreconditionFailed": "",
}
_FULL_CODES: Final = {code for code, hint in _HINTS.items() if hint is _FULL}
_BY_STATUS: Final = {
    301: _MOVED,
    302: _MOVED,
    303: _MOVED,
    307: _MOVED,
    308: _MOVED,
    401: _CREDENTIALS,
    403: _RIGHTS,
    413: "one object cannot be as large there; make the chunks smaller",
    429: "the store asks for fewer requests; try again later",
    507: _FULL,
}
_UNREACHABLE: Final = "check the endpoint and the network"
_NO_ANSWER: Final = {
    "unreachable": "cannot be reached",
    "timeout": "did not answer in time",
    "cut": "broke the connection off before its answer was whole",
}


@dataclass(frozen=True, slots=True)
class Failure:
    """The kind of a failure, without any text of the client or the server.

    Parameters
    ----------
    kind : str
        `"absent"`, `"exists"`, `"changed"`, `"credentials"`, `"unreachable"`, `"timeout"`,
        `"cut"` (the connection ended before the answer), `"denied"`, `"elsewhere"` (in another
        region), `"redirected"`, `"whole"` (it has no byte ranges), `"provider"` (of credentials)
        or `"other"`.
    status : int, optional
        The status of the answer, if there was one.
    code : str, optional
        The error code in the answer, if it is a known one.
    host : str
        The host of a redirect, if known.
    fault : str
        For `"provider"`, the key in `FAULTS`.
    """

    kind: str
    status: int | None = None
    code: str | None = None
    host: str = ""
    fault: str = ""

    @property
    def range_beyond(self) -> bool:
        """Whether the object exists but ends before the range begins."""
        return self.status == 416

    @property
    def is_lost(self) -> bool:
        """Whether no answer came although the request may have arrived."""
        return self.kind in ("cut", "timeout")


def failure_of(error: BaseException) -> Failure:
    """Classify the client's error."""
    text = str(error)[:_READ_CHARS]
    status = _STATUS.search(text)
    codes = [code for code in _CODE.findall(text) if code in _HINTS]
    found = int(status[1]) if status else _own_status(text)
    to = _REDIRECT.search(_own(text))
    kind = _kind(error, text, found, codes)
    fault = _PROVIDED.search(text) if kind == "provider" else None
    return Failure(
        kind,
        found,
        codes[0] if codes else None,
        host=to[1] if to else "",
        fault=fault[1] if fault else "",
    )


def _own_status(text: str) -> int | None:
    # Some servers answer a range that begins at the end of the object; the client refuses that.
    return 416 if "StartTooLarge {" in _own(text) else None


def _own(text: str) -> str:
    """The client's own words."""
    return text.partition("Server returned")[0]


def _kind(error: BaseException, text: str, status: int | None, codes: list[str]) -> str:
    name = type(error).__name__
    missing = any(_HINTS[code] is _BUCKET for code in codes)
    if name == "AlreadyExistsError":
        return "exists"
    if name == "PreconditionError" and not missing:
        return "changed"
    if isinstance(error, FileNotFoundError) or status == 410:
        return "other" if missing else "absent"
    if "Range request not supported" in text or "non-partial response when range" in text:
        return "whole"
    own = _own(text)
    if _PROVIDED.search(own):
        return "provider"
    if "//169.254.169.254/" in own or "token request" in own or "/api/token " in own:
        return "credentials"
    if status == 421 or "TunnelUnsuccessful" in own or "kind: Redirect" in own:
        return "redirected"
    if "redirect without LOCATION" in own:
        return "elsewhere"
    if name in ("PermissionDeniedError", "UnauthenticatedError"):
        return "denied"
    if status is None:
        return _without_answer(text)
    return "other"


def _without_answer(text: str) -> str:
    if "kind: Timeout" in text or "TimedOut" in text:
        return "timeout"
    if "kind: Interrupted" in text:
        return "cut"
    if "kind: Connect" in text or "error sending request" in text or "kind: Request" in text:
        return "unreachable"
    return "other"


def storage_error(failure: Failure, doing: str, key: str, url: str) -> StorageError:
    """The error to raise: the action, the object, the reason, and what to do about it."""
    if failure.kind == "absent":
        return ObjectNotFoundError(f"there is no object {key!r} in {url}")
    where = f"{key!r} in {url}" if key else url
    said = " ".join([str(failure.status or ""), failure.code or ""]).strip()
    code_hint = _HINTS.get(failure.code or "", "")
    if failure.kind == "credentials":
        return StorageError(f"cannot {doing} {where}: no credentials were found; {_CREDENTIALS}")
    if failure.kind == "provider":
        return StorageError(
            f"cannot {doing} {where}: {FAULTS.get(failure.fault, FAULTS['raised'])}"
        )
    if failure.kind == "elsewhere":
        return StorageError(f"cannot {doing} {where}: {_REGION}")
    if failure.kind == "redirected":
        return StorageError(
            f"cannot {doing} {where}: the store sends to another host, {failure.host}, "
            "which was not asked: use the address that it sends to, or, for a web server, "
            "from_url(..., allow_redirects=True)"
        )
    if failure.kind == "whole":
        return UnsupportedStorageError(
            f"cannot {doing} {where}: the server has no byte ranges, and answers with the whole "
            "object; use a server that has them, or copy what is there"
        )
    if failure.kind in _NO_ANSWER:
        what = _NO_ANSWER[failure.kind]
        return StorageError(f"cannot {doing} {where}: the store {what}; {_UNREACHABLE}")
    hint = code_hint or _BY_STATUS.get(failure.status or 0, "")
    message = f"cannot {doing} {where}: the store refused ({said})" if said else (
        f"cannot {doing} {where}: the client of the store failed"
    )  # fmt: skip
    message += f": {hint}" if hint else ""
    if failure.code in _FULL_CODES or failure.status == 507:
        return StorageFullError(message)
    if failure.code == "NotImplemented" or failure.status == 501:
        return UnsupportedStorageError(message)
    return StorageError(message)
