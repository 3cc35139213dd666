"""Options, rules of manifests, YAML, and what is saved with a repository."""

from __future__ import annotations

from planted.fault import Fault

FAULTS = [
    Fault(
        "passwords-in-saved-urls",
        "config/__init__.py",
        "\\\\@?#]{1,1000}",
        "\\\\?#]{1,1000}",
    ),
    Fault(
        "unknown-saved-options-ignored",
        "config/sections.py",
        "            if option is None:\n",
        "            if option is None: continue\n            if False:\n",
    ),
    Fault(
        "sets-overflow-in-circles",
        "config/manifest_sets.py",
        "        if left:\n",
        "        if len(left) > 99:\n",
    ),
    Fault(
        "keys-given-twice-accepted",
        "config/yaml_text.py",
        "if key in found:",
        "if key in found and not key:",
    ),
    Fault(
        "the-last-rule-wins",
        "config/manifest_sets.py",
        "for i in matching(paths, path))",
        "for i in reversed(matching(paths, path)))",
    ),
    Fault(
        "configurations-of-any-size",
        "config/__init__.py",
        "if size > _MAX_CONFIG_BYTES:",
        "if size > _MAX_CONFIG_BYTES**2:",
    ),
    Fault(
        "paths-match-in-part",
        "config/manifest_sets.py",
        "_compiled(regex).fullmatch(path)",
        "_compiled(regex).search(path)",
    ),
    Fault(
        "sections-replaced-as-a-whole",
        "config/sections.py",
        "self.kind.read(value, faults, before)",
        "self.kind.read(value, faults)",
    ),
    Fault(
        "rules-outlive-their-sets",
        "config/sections.py",
        "if values.get(field) is not None:",
        'if values.get(field) is not None and field != "sets":',
    ),
    Fault(
        "durations-are-rounded",
        "config/__init__.py",
        "if seconds and seconds % size == 0:",
        "if seconds >= size:",
    ),
]
