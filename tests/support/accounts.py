"""Accounts of object stores, in a module that every process can import."""

from __future__ import annotations

from datetime import datetime
from typing import Any

ASKED: list[str] = []
SECRET = "PLANTEDsecret"


def _keys(who: str, **more: Any) -> dict[str, Any]:
    ASKED.append(who)
    return {"access_key_id": who, "secret_access_key": f"{SECRET}{who}", **more}


def alice() -> dict[str, Any]:
    return _keys("ALICE")


def bob() -> dict[str, Any]:
    return _keys("BOB", token=f"{SECRET}token")


class Provider:
    """Made once in each process."""

    def __init__(self) -> None:
        ASKED.append("made")

    def __call__(self) -> dict[str, Any]:
        return _keys("CLASS")


def failing() -> dict[str, Any]:
    raise KeyError(SECRET)


def no_mapping() -> Any:
    return SECRET


def other_keys() -> Any:
    return {"aws_secret": SECRET}


def naive_time() -> Any:
    return _keys("NAIVE", expires_at=datetime(2026, 1, 1))  # noqa: DTZ001 - the fault
