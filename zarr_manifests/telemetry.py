"""The counts of this process as OpenTelemetry metrics, where `opentelemetry-api` is installed.

It is looked for once a process, when a repository is first opened, so that importing this package
costs nothing. Each field of `Metrics` becomes an observable counter `zarr_manifests.<field>`, which
is read when somebody collects; whoever sets a meter provider, before or after, gets them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any

from zarr_manifests.metrics import Metrics, process_totals
from zarr_manifests.runtime import ForkSafeLock

__all__ = ["connect"]

_UNITS = {"bytes": "By", "requests": "{request}", "refs": "{ref}", "files": "{file}"}


class _Connection:
    lock = ForkSafeLock()
    tried = False


def connect() -> None:
    """Offer the counts to OpenTelemetry, if it is there and they are not offered yet."""
    if _Connection.tried:
        return
    with _Connection.lock:
        if _Connection.tried:
            return
        _Connection.tried = True
        try:
            from opentelemetry import metrics
        except ImportError:
            return
        meter = metrics.get_meter("zarr_manifests")
        for field in fields(Metrics):
            meter.create_observable_counter(
                f"zarr_manifests.{field.name}",
                [_observer(field.name, metrics.Observation)],
                unit=next((_UNITS[w] for w in field.name.split("_") if w in _UNITS), "1"),
                description=f"zarr_manifests.metrics.Metrics.{field.name} of this process",
            )


def _observer(name: str, observation: Callable[[int], Any]) -> Callable[[Any], Iterable[Any]]:
    def observe(_: Any) -> Iterable[Any]:
        return [observation(getattr(process_totals(), name))]

    return observe
