"""URLs: what they open, and what is refused without being repeated."""

from typing import Any

import pytest

import accounts
from zarr_manifests.errors import ConfigError, InvalidArgumentError
from zarr_manifests.storage import from_url
from zarr_manifests.storage.object_store import ObjectStorage
from zarr_manifests.storage.url import parse_options


@pytest.mark.parametrize(
    ("given", "url", "options"),
    [
        ("s3a://bucket/winds/", "s3://bucket/winds", ()),
        ("gcs://bucket/winds", "gs://bucket/winds", ()),
        ("abfs://box@alice.dfs.core.windows.net/winds", "az://box/winds", (("account", "alice"),)),
    ],
)
def test_schemes_mean_what_they_mean_in_spark(given: str, url: str, options: Any) -> None:
    storage = from_url(given)
    assert isinstance(storage, ObjectStorage)
    assert storage.url == url
    assert storage.place == from_url(url, **dict(options)).place  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="regoin: unknown storage option; s3:// takes"):
        from_url("s3a://bucket", regoin="eu-west-1")


def test_an_account_is_said_once() -> None:
    with pytest.raises(ConfigError, match="another than the one in the URL"):
        from_url("abfss://box@alice.dfs.core.windows.net/winds", account="bob")
    with pytest.raises(InvalidArgumentError, match="user or password") as error:
        from_url("abfss://box@alice:geheim.dfs.core.windows.net/winds")
    assert "geheim" not in str(error.value)


BAD = {
    "retries": (-1, 1.5, True),
    "timeout_s": (0, float("nan"), "5"),
    "concurrency": (0, False),
    "headers": (
        *({name: "geheim"} for name in ("Authorization", "X-Auth-Token", "", "a b", "é")),
        *({"x-team": value} for value in ("geheim\r\nx: y", "gehéim", None)),
        "geheim",
    ),
    "requester_pays": ("true",),
}


def test_values_of_options() -> None:
    for name, values in BAD.items():
        for value in values:
            with pytest.raises(ConfigError) as error:
                from_url("s3://bucket", **{name: value})
            assert [problem.split(":")[0] for problem in error.value.problems] == [name]
            assert "geheim" not in str(error.value)


def test_options_are_read_from_text() -> None:
    texts = {
        "region": "eu-west-1",
        "allow_http": "True",
        "retries": "3",
        "timeout_s": "2.5",
        "headers": '{"x-team": "winds"}',
        "credentials": "accounts:alice",
    }
    typed = {"allow_http": True, "retries": 3, "timeout_s": 2.5, "headers": {"x-team": "winds"}}
    assert parse_options("s3a://bucket", texts) == texts | typed | {"credentials": accounts.alice}
    assert parse_options("/data", {"force": "true"}) == {"force": True}
    faults = {"allow_http": "yes", "retries": "x", "timeout_s": "x", "headers": "[geheim"}
    with pytest.raises(ConfigError) as error:
        parse_options("s3://bucket", faults)
    assert [problem.split(":")[0] for problem in error.value.problems] == list(faults)
    assert "geheim" not in str(error.value)
    with pytest.raises(ConfigError, match="secret_access_key: a secret cannot be"):
        parse_options("s3://bucket", {"secret_access_key": "geheim"})
    for name in ("accounts", ":alice", "accounts:nobody", "accounts:SECRET", "no.x:y"):
        with pytest.raises(InvalidArgumentError, match="cannot be imported in this process"):
            parse_options("s3://bucket", {"credentials": name})
