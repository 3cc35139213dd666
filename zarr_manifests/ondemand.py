"""Packages that import their modules when these are first used."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any


def on_demand(package: str, *modules: str, **names: str) -> Callable[[str], Any]:
    """A package's `__getattr__`: it imports a module, or a name from its module, when it is used.

    Type checkers do not follow it, so the package imports the same under `TYPE_CHECKING`.

    Parameters
    ----------
    package : str
        Its `__name__`.
    *modules : str
        Its modules.
    **names : str
        The modules of other names.

    Examples
    --------
    >>> from zarr_manifests.engine import upkeep
    >>> upkeep.verify.__name__
    'zarr_manifests.engine.upkeep.verify'
    """

    def attribute(name: str) -> Any:
        if name in names:
            return getattr(import_module(f"{package}.{names[name]}"), name)
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return import_module(f"{package}.{name}")

    return attribute
