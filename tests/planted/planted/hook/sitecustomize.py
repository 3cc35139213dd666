"""Plants one fault into the package in memory, in this process and in all that it starts.

Python imports this module first where its folder is on PYTHONPATH. `PLANTED_FAULT` is a list in
JSON: the module's path, the text to replace, and the text to put there.
"""

from __future__ import annotations

import json
import os
from importlib.machinery import SourceFileLoader
from types import CodeType

_get_code = SourceFileLoader.get_code


def _plant(self: SourceFileLoader, fullname: str) -> CodeType | None:
    path, old, new = json.loads(os.environ["PLANTED_FAULT"])
    if not self.path.endswith(path):
        return _get_code(self, fullname)
    source = self.get_data(self.path).decode()
    if source.count(old) != 1:
        raise ImportError(f"the planted fault fits {source.count(old)} times into {path}")
    return self.source_to_code(source.replace(old, new), self.path)


if os.environ.get("PLANTED_FAULT"):
    SourceFileLoader.get_code = _plant  # type: ignore[assignment, method-assign]
