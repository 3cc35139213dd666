"""Modules that are imported when they are first used, and packages that may not be installed."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
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


def need(what: str, extra: str, *packages: str) -> None:
    """Refuse what needs a package that is not installed.

    Parameters
    ----------
    what : str
        What needs the packages.
    extra : str
        The extra of this package that brings them.
    *packages : str
        Their names.

    Raises
    ------
    ModuleNotFoundError
        If one is not installed; it says how to get it.

    Examples
    --------
    >>> from zarr_manifests.ondemand import need
    >>> need("plot()", "plot", "numpy")  # which is installed
    """
    for name in packages:
        if find_spec(name) is None:
            raise ModuleNotFoundError(
                f"{what} needs {name}, which is not installed here; get all it needs with: "
                f'pip install "zarr-manifests[{extra}]"',
                name=name,
            )
