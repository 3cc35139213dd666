"""Finding options that may be secret, by their names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import FunctionType
from typing import Final

__all__ = ["has_secrets", "is_secret"]

_SECRET: Final = re.compile(
    r"(?i).*(key|secret|token|password|credential|sas|signature|conn(ection)?_?str).*"
)
_HEADERS: Final = re.compile(r"(?i).*(header|auth).*")


def is_secret(name: str) -> bool:
    """Whether an option of that name may hold a secret.

    Examples
    --------
    >>> from zarr_manifests.storage.secrets import is_secret
    >>> [is_secret(name) for name in ("aws_secret_access_key", "connection_string", "region")]
    [True, True, False]
    """
    return _SECRET.fullmatch(name) is not None


def has_secrets(options: object) -> bool:
    """Whether a value in the options, at any depth, may be a secret by its name.

    A named function or a class, which a pickle only refers to, is none.

    Examples
    --------
    >>> from zarr_manifests.storage.secrets import has_secrets
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
