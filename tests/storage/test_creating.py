"""Creating a repository in an object store: in two rounds of requests, and nowhere it should not.

A round is counted by holding its requests back until all of them have come: were one of them sent
only after another is answered, none would be.
"""

from __future__ import annotations

from typing import Any

import pytest

import zarr_manifests as zm
from zarr_manifests.errors import AlreadyExistsError
from zarr_manifests.storage import object_store

URL = "s3://bucket/prefix"


def test_who_may_not_write_hears_what_is_there(small_store: Any) -> None:
    zm.create(URL)
    object_store._IGNORED.clear()
    small_store.refuse({"PUT", "DELETE"}, 403, "AccessDenied")
    with pytest.raises(AlreadyExistsError, match="there is a repository"):
        zm.create(URL)
