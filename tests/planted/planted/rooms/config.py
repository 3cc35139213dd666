"""Options, rules of manifests, YAML, and what is saved with a repository."""

from __future__ import annotations

from planted.fault import Fault

FAULTS = [
    Fault(
        "passwords-in-saved-urls",
        "config/saved_containers.py",
        "\\\\@?#]{1,1000}",
        "\\\\?#]{1,1000}",
    ),
    Fault(
        "unknown-saved-options-ignored",
        "config/sections.py",
        "for key in plain if key not in options]",
        "for key in plain if key is None]",
    ),
    Fault(
        "sets-overflow-in-circles",
        "config/manifest_sets.py",
        "if way and one.name == min",
        "if len(way) > 99 and one.name == min",
    ),
    Fault(
        "keys-given-twice-accepted",
        "config/yaml_text.py",
        "elif value in inside:",
        "elif value in inside and not value:",
    ),
    Fault(
        "the-last-rule-wins",
        "config/manifest_sets.py",
        "for i in self._paths.matching(path))])",
        "for i in self._paths.matching(path))], reverse=True)",
    ),
    Fault(
        "configurations-of-any-size",
        "config/repository_config.py",
        "if size > MAX_CONFIG_BYTES:",
        "if size > MAX_CONFIG_BYTES**2:",
    ),
    Fault(
        "paths-match-in-part",
        "config/path_regex.py",
        "compiled.fullmatch(path)",
        "compiled.search(path)",
    ),
    Fault(
        "sections-replaced-as-a-whole",
        "config/parsing.py",
        "value = _merged(inner, value or {})",
        "value = value or {}",
    ),
    Fault(
        "rules-outlive-their-sets",
        "config/parsing.py",
        '        named.add("rules")',
        '        named.discard("rules")',
    ),
    Fault(
        "durations-are-rounded",
        "config/snapshots.py",
        "if seconds and seconds % size == 0:",
        "if seconds >= size:",
    ),
]
