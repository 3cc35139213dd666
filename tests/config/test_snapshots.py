"""The section `snapshots`: read, written, refused, and gone by where nothing else is said."""

from __future__ import annotations

from datetime import timedelta

import pytest
import zarr

import zarr_manifests as zm
from zarr_manifests import Config, Repository
from zarr_manifests.config import Snapshots
from zarr_manifests.error_cases import ConfigError
from zarr_manifests.errors import InvalidArgumentError
from zarr_manifests.storage.memory import MemoryStorage


@pytest.mark.parametrize(
    ("text", "written"),
    [("30d", "30d"), ("2w", "14d"), ("1.5d", "36h"), ("90s", "90s"), ("0s", "0s"), ("120m", "2h")],
)
def test_a_duration_is_read_and_written(text: str, written: str) -> None:
    config = Config.from_yaml(f"snapshots: {{max-age: {text}, keep-last: 7}}")
    assert config.to_dict()["snapshots"] == {"keep-last": 7, "max-age": written}
    assert Config.from_yaml(config.to_yaml()) == config


@pytest.mark.parametrize(
    "options",
    [
        *({"max-age": bad} for bad in ("long", "-1d", "0.5s", "999999999w", "40000d", 30, "1 d")),
        *({"keep-last": bad} for bad in (0, -1, "3", True, 10**10)),
    ],
)
def test_what_cannot_be_is_refused_with_its_place(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.from_dict({"snapshots": options})
    assert [p.partition(":")[0] for p in caught.value.problems] == [
        f"snapshots.{next(iter(options))}"
    ]


def test_values_are_checked_when_the_section_is_built() -> None:
    with pytest.raises(ConfigError):
        Snapshots(max_age=timedelta(seconds=-1))
    with pytest.raises(ConfigError):
        Snapshots(max_age="30d")  # type: ignore[arg-type]


def filled(config: dict[str, object] | None = None) -> Repository:
    repository = zm.create(MemoryStorage(), config)
    for i in range(6):
        with repository.transaction(message=f"{i}") as store:
            zarr.create_group(store, path=f"g{i}")
    return repository


def test_an_expiry_goes_by_the_configuration_where_it_is_not_told() -> None:
    repository = filled({"snapshots": {"keep-last": 3, "max-age": "0s"}})
    assert repository.expire_snapshots(dry_run=True).kept == {"main": 3}
    assert repository.expire_snapshots(keep_last=5, dry_run=True).kept == {"main": 5}
    assert repository.expire_snapshots(max_age=timedelta(days=1), dry_run=True).kept == {"main": 7}
    assert repository.expire_snapshots().kept == {"main": 3}


def test_the_configuration_of_this_process_counts_and_none_is_an_error() -> None:
    repository = filled()
    with pytest.raises(InvalidArgumentError, match="keep_last"):
        repository.expire_snapshots()
    repository = zm.open(repository.storage, {"snapshots": {"max-age": "36525d"}})
    assert repository.expire_snapshots().kept == {"main": 7}
