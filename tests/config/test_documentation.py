"""The YAML of the documentation is valid, and what it says of options is what their fields say."""

from __future__ import annotations

import re
from dataclasses import MISSING
from pathlib import Path

import pytest

from zarr_manifests.config import Config, ManifestSet, Preload, Rule
from zarr_manifests.config.kinds import Kind, LabelsKind, ListOf, Number, Whole, Word
from zarr_manifests.config.sections import Nested, Option, Section, options_of

HERE = Path(__file__).parent
PAGE = (HERE.parents[1] / "docs" / "guide" / "configuration.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS)
def test_every_block_is_valid(block: str) -> None:
    config = Config.from_yaml(block)
    assert Config.from_yaml(config.to_yaml()) == config


def test_the_default_and_both_examples_are_there() -> None:
    configs = [Config.from_yaml(block) for block in BLOCKS]
    assert configs[0] == Config()
    assert BLOCKS[0].count("\n") > 20, "written out"
    for name in ("long.yaml", "short.yaml"):
        example = Config.from_yaml((HERE / name).read_text(encoding="utf-8"))
        assert configs.count(example) == 1


# --- the tables of options ------------------------------------------------------------------------


def span(kind: Kind) -> str:
    """The values that a kind allows."""
    match kind:
        case Word():
            return ", ".join(f"`{word}`" for word in kind.words)
        case Whole() | Number():
            return f"{kind.low:,} to {'2^62' if kind.high == 2**62 else f'{kind.high:,}'}"
        case Nested():
            return "see below"
        case ListOf():
            return "a list of [containers](virtual.md#save-containers)"
        case LabelsKind():
            return "a map of up to 64 names to texts, numbers, true and false"
    return "`30d`, `24h`, `10m`, `0s` up to 36,525 days"


def default(option: Option) -> str:
    plain = None if option.default is None else option.kind.write(option.default)
    number = isinstance(plain, int | float)
    return f"{plain:,}" if number else f"`{'null' if plain is None else plain}`"


def rows(section: type[Section], prefix: str = "") -> list[tuple[str, Option]]:
    """The options of a section and of those within, but for the planning of manifests."""
    found = []
    for name, option in options_of(section).items():
        inner = option.kind.section if isinstance(option.kind, Nested) else None
        if inner is None or name == "chunk-manifests":
            found.append((prefix + name, option))
        else:
            found += rows(inner, f"{name}.")
    return found


def meaning(option: Option) -> str:
    also = "".join(f". Also accepted as `{name}`" for name in option.also)
    required = "; required" if option.default is MISSING else ""
    return option.about + required + also


def all_options() -> str:
    lines = ["| option | range | default | meaning |", "|---|---|---|---|"]
    for name, option in rows(Config):
        nested = isinstance(option.kind, Nested)
        null = ", or null" if option.nullable else ""
        said = "" if nested else default(option)
        lines.append(f"| `{name}` | {span(option.kind)}{null} | {said} | {option.about} |")
    return "\n".join(lines)


def options_with_defaults(section: type[Section]) -> str:
    lines = ["| option | default | meaning |", "|---|---|---|"]
    for name, option in rows(section):
        if name != "name":
            lines.append(f"| `{name}` | {default(option)} | {meaning(option)} |")
    return "\n".join(lines)


def conditions() -> str:
    lines = ["| option | meaning |", "|---|---|"]
    lines += [f"| `{name}` | {meaning(option)} |" for name, option in rows(Rule)]
    return "\n".join(lines)


TABLES = {
    "Config": all_options(),
    "ManifestSet": options_with_defaults(ManifestSet),
    "Rule": conditions(),
    "Preload": options_with_defaults(Preload),
}


@pytest.mark.parametrize("name", TABLES)
def test_the_tables_say_what_the_fields_say(name: str) -> None:
    """To renew: put what this shows into the page."""
    assert f"\n\n{TABLES[name]}\n\n" in PAGE, f"due is:\n\n{TABLES[name]}"
