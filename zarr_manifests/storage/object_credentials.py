"""Credentials that a caller gives by a function, and options that may be secret by their names.

Invariants:

- A secret is passed from the function to the client, and kept nowhere else. What the function
  raises is not passed on either, since it may contain one.
- *A pickle holds a reference*: the module and the name of the function. Pickles made by value, as
  cloudpickle makes them of what a notebook defines, would contain the secrets in its code.
- *Credentials are renewed*: the client asks again before the time `expires_at`.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from contextlib import suppress
from datetime import UTC, datetime
from pkgutil import resolve_name
from types import FunctionType
from typing import Any, Final, cast

from zarr_manifests.errors import InvalidArgumentError, UnsupportedStorageError
from zarr_manifests.runtime import start_thread

FAULTS: Final = {
    "raised": "the function given as credentials raised an error; call it yourself to see it",
    "no-mapping": "the function given as credentials did not return a mapping",
    "no-time": "the function given as credentials returned an `expires_at` that is not a datetime "
    "with a time zone",
    "keys": "the function given as credentials did not return the right keys: on S3 access_key_id, "
    "secret_access_key and perhaps token, on Google Cloud token, on Azure token, sas_token or "
    "access_key; all of them text, and perhaps expires_at",
    "profile": "the AWS SDK has no valid credentials for the profile; log in again, as with "
    "`aws sso login`, or check the profile",
}
"""What was wrong with a provider, without any text of its own: the message of its error."""

_SECRET: Final = re.compile(
    r"(?i).*(key|secret|token|password|credential|sas|signature|conn(ection)?_?str).*"
)
_HEADERS: Final = re.compile(r"(?i).*(header|auth).*")
_NOT_FOUND: Final = (ImportError, AttributeError, ValueError)
_ANSWERS: Final = {
    "s3": ({"access_key_id", "secret_access_key"},),
    "gs": ({"token"},),
    "az": ({"token"}, {"sas_token"}, {"access_key"}),
}


def checked_credentials(given: object) -> Callable[[], object]:
    """Return the credentials if they are a function or a provider.

    Raises
    ------
    InvalidArgumentError
        If they are anything else, such as the secrets themselves.
    """
    if not callable(given):
        raise InvalidArgumentError(
            f"credentials is a function without arguments that returns them, not a "
            f"{type(given).__name__}: secrets themselves would end up in pickles and logs"
        )
    try:
        hash(given)
    except TypeError:
        raise InvalidArgumentError("the object given as credentials is not hashable") from None
    return given


def reference_to(credentials: Callable[[], object]) -> str:
    """Return `module:name` of a function or class, by which another process finds it.

    Raises
    ------
    InvalidArgumentError
        If it has no name in a module.
    """
    module, name = (getattr(credentials, each, "") for each in ("__module__", "__qualname__"))
    reference, found = f"{module}:{name}", None
    with suppress(*_NOT_FOUND):
        found = resolve_name(reference)
    if found is not credentials:
        raise InvalidArgumentError(
            "these credentials cannot be sent to another process, since only the name of a "
            "function is sent, and never a secret: pass a function or class at the top of a module"
        )
    return reference


def function_named(reference: str) -> Callable[[], object]:
    """Return the function or class with that `module:name`.

    Raises
    ------
    InvalidArgumentError
        If this process has none of that name.
    """
    found: Any = None
    with suppress(*_NOT_FOUND):
        found = resolve_name(reference)
    if not callable(found):
        raise InvalidArgumentError(
            f"credentials {reference[:200]!r} cannot be imported in this process: pass "
            "module:function of a module that every process can import"
        )
    return cast("Callable[[], object]", found)


def provider(
    kind: str, credentials: Callable[[], object], *, fault: str = "raised"
) -> Callable[[], dict[str, Any]]:
    """Return what the client calls for credentials; its errors say nothing of them.

    Parameters
    ----------
    kind : str
        `"s3"`, `"gs"` or `"az"`.
    credentials : callable
        Returns a mapping as obstore's credential providers do. A class is instantiated once.
    fault : str
        The key in `FAULTS` for when it raises.
    """
    ask: Any = None if isinstance(credentials, type) else credentials

    def provide() -> dict[str, Any]:
        nonlocal ask
        failed = False
        try:
            ask = credentials() if ask is None else ask
            found = ask()
            found = _awaited(found) if inspect.iscoroutine(found) else found
        except Exception:  # noqa: BLE001 - whatever it raises may contain a secret
            failed = True  # so that the error below does not have that one as its context
        if failed:
            raise RuntimeError(FAULTS[fault])
        if not isinstance(found, Mapping):
            raise TypeError(FAULTS["no-mapping"])
        answer = dict(found)
        expires_at = answer.pop("expires_at", None)
        if expires_at is not None:
            if not (isinstance(expires_at, datetime) and expires_at.tzinfo):
                raise ValueError(FAULTS["no-time"])
            # The client knows no other time zones, such as the SDK's.
            expires_at = expires_at.astimezone(UTC)
        names = answer.keys() - ({"token"} if kind == "s3" else set())
        if names not in _ANSWERS[kind] or not all(
            isinstance(answer[name], str) and answer[name] for name in names
        ):
            raise ValueError(FAULTS["keys"])
        return ({"token": None} if kind == "s3" else {}) | answer | {"expires_at": expires_at}

    return provide


def _awaited(found: Coroutine[Any, Any, object]) -> object:
    """What it returns, from a thread of its own: this one may have a running loop."""
    import asyncio

    done: Future[object] = Future()

    def run() -> None:
        try:
            done.set_result(asyncio.run(found))
        except BaseException as error:  # noqa: BLE001 - it is raised by the thread that waits
            done.set_exception(error)

    start_thread(run)
    return done.result()


def from_profile(profile: str) -> tuple[Callable[[], dict[str, Any]], str | None]:
    """Return a provider for a profile of the AWS configuration, and the region that it sets.

    The SDK resolves it: keys, roles to assume, processes, and tokens that `aws sso login` left.

    Raises
    ------
    UnsupportedStorageError
        If the SDK is not installed.
    InvalidArgumentError
        If there is no such profile.
    """
    if importlib.util.find_spec("botocore") is None:
        raise UnsupportedStorageError(
            "profile needs the AWS SDK for Python: pip install boto3 (or aiobotocore)"
        )
    session: Any = importlib.import_module("botocore.session").Session(profile=profile)
    if profile not in session.available_profiles:
        raise InvalidArgumentError(
            "there is no such profile in the AWS configuration (~/.aws/config, ~/.aws/credentials)"
        )

    def credentials() -> dict[str, Any]:
        found = session.get_credentials()  # resolved once, and renewed by the SDK
        keys = found.get_frozen_credentials()
        return {
            "access_key_id": keys.access_key,
            "secret_access_key": keys.secret_key,
            "token": keys.token,
            "expires_at": getattr(found, "_expiry_time", None),
        }

    region = session.get_config_variable("region")
    return provider("s3", credentials, fault="profile"), None if region is None else str(region)


# --- options that may be secret ----------------------------------------------------------------


def is_secret(name: str) -> bool:
    """Whether an option of that name may hold a secret.

    Examples
    --------
    >>> from zarr_manifests.storage.object_credentials import is_secret
    >>> [is_secret(name) for name in ("aws_secret_access_key", "connection_string", "region")]
    [True, True, False]
    """
    return _SECRET.fullmatch(name) is not None


def has_secrets(options: object) -> bool:
    """Whether a value in the options, at any depth, may be a secret by its name.

    A named function or a class, which a pickle only refers to, is none.

    Examples
    --------
    >>> from zarr_manifests.storage.object_credentials import has_secrets
    >>> has_secrets({"client_kwargs": {"region_name": "eu-west-1"}, "anon": True, "key": None})
    False
    >>> has_secrets([{"config": {"access_key_id": "planted"}}])
    True
    """
    if isinstance(options, Mapping):
        return any(
            has_secrets(value)
            or ((is_secret(str(name)) or _HEADERS.fullmatch(str(name))) and not _is_open(value))
            for name, value in options.items()
        )
    return isinstance(options, list | tuple) and any(map(has_secrets, options))


def _is_open(value: object) -> bool:
    return not value or isinstance(value, bool | int | float | FunctionType | type)
