"""The YAML of the documentation is valid, and what it says of defaults is so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from zarr_manifests.config import RepositoryConfig

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "guide" / "configuration.md"
BLOCKS = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS)
def test_every_block_is_valid(block: str) -> None:
    config = RepositoryConfig.from_yaml(block)
    assert RepositoryConfig.from_yaml(config.to_yaml()) == config


def test_the_default_and_both_examples_are_there() -> None:
    configs = [RepositoryConfig.from_yaml(block) for block in BLOCKS]
    assert configs[0] == RepositoryConfig()
    assert BLOCKS[0].count("\n") > 20, "written out"
    for name in ("long.yaml", "short.yaml"):
        example = RepositoryConfig.from_yaml((HERE / name).read_text(encoding="utf-8"))
        assert configs.count(example) == 1
