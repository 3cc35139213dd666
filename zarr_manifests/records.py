"""Dataclasses that are quick to define: a method is compiled when it is first used.

Compiling the methods of every class takes longer than the rest of an import, and a process uses few
of them. `dataclasses.fields`, `replace` and the others work as usual.
"""

from __future__ import annotations

import dataclasses
import reprlib
import sys
from collections.abc import Callable
from dataclasses import MISSING, FrozenInstanceError, fields
from types import MemberDescriptorType
from typing import TYPE_CHECKING, Any, Final

__all__ = ["dataclass"]

if TYPE_CHECKING:
    from dataclasses import dataclass
else:

    def dataclass(*, init=True, repr=True, eq=True, frozen=False, slots=False, **options):  # noqa: A002
        """A decorator with the meaning and the options of `dataclasses.dataclass`.

        Examples
        --------
        >>> from zarr_manifests.records import dataclass
        >>> @dataclass(frozen=True, slots=True)
        ... class Range:
        ...     offset: int
        ...     length: int = 0
        >>> Range(4), Range(4) == Range(offset=4)
        (Range(offset=4, length=0), True)
        """

        def decorated(cls):
            methods = {}
            if init:
                methods["__init__"] = _Later(_init, frozen)
            if repr:
                methods["__repr__"] = _repr
            if eq:
                methods["__eq__"] = _Later(_eq)
                methods["__hash__"] = _Later(_hash) if frozen else None
            if frozen:
                methods |= {"__setattr__": _refuse_set, "__delattr__": _refuse_delete}
            if frozen and slots:
                methods |= {"__getstate__": _get_state, "__setstate__": _set_state}
            for name, method in methods.items():
                if vars(cls).get(name) is None:
                    setattr(cls, name, method)
                    if isinstance(method, _Later):
                        method.__set_name__(cls, name)
            cls.__doc__ = cls.__doc__ or cls.__name__  # its signature would need `__init__`
            rest = dataclasses.dataclass(init=False, repr=False, eq=False, slots=slots, **options)
            return rest(cls)

        return decorated


class _New:
    def __repr__(self) -> str:
        return "<factory>"


_NEW: Final = _New()
"""The default of a parameter whose value a factory makes."""


class _Later:
    """A method that is compiled, and takes its place in the class, when it is first looked up."""

    def __init__(self, source: Callable[..., str], *options: bool) -> None:
        self._source, self._options = source, options

    def __set_name__(self, owner: Any, name: str) -> None:
        self._owner, self._name = owner, name

    def __get__(self, instance: object, _: type | None = None) -> Any:
        owner, name = self._owner, self._name
        used: dict[str, object] = {}
        source = self._source(owner, used, *self._options)
        made: dict[str, Any] = {}
        text = f"def made({', '.join(used)}):\n def {name}{source}\n return {name}"
        exec(text, vars(sys.modules[owner.__module__]), made)  # noqa: S102 - names of fields only
        method = made["made"](**used)
        method.__qualname__ = f"{owner.__qualname__}.{name}"
        if name == "__init__":
            types = {field.name: field.type for field in fields(owner) if field.init}
            method.__annotations__ = {**types, "return": None}
        setattr(owner, name, method)
        return method if instance is None else method.__get__(instance)


def _init(owner: Any, used: dict[str, object], frozen: bool) -> str:
    given, by_name, lines = ["self"], ["*"], []
    used |= {"_set": object.__setattr__, "_NEW": _NEW}
    for field in fields(owner):
        name, value, default = field.name, field.name, f"_default_{field.name}"
        if field.default_factory is not MISSING:
            used[default] = field.default_factory
            value = f"{default}() if {name} is _NEW else {name}" if field.init else f"{default}()"
            parameter = f"{name}=_NEW"
        elif field.default is not MISSING:
            used[default] = field.default
            value = name if field.init else default
            parameter = f"{name}={default}"
        elif field.init:
            parameter = name
        else:
            continue
        if field.init:
            (by_name if field.kw_only else given).append(parameter)
        slot = getattr(owner, name, None)
        if not frozen:
            lines.append(f"  self.{name} = {value}")
        elif isinstance(slot, MemberDescriptorType):  # a third faster than by name
            used[f"_set_{name}"] = slot.__set__
            lines.append(f"  _set_{name}(self, {value})")
        else:
            lines.append(f"  _set(self, {name!r}, {value})")
    if hasattr(owner, "__post_init__"):
        lines.append("  self.__post_init__()")
    parameters = given + by_name if len(by_name) > 1 else given
    return "\n".join([f"({', '.join(parameters)}):", *lines, "  return None"])


def _eq(owner: Any, _: dict[str, object]) -> str:
    same = [f"self.{field.name} == other.{field.name}" for field in fields(owner) if field.compare]
    return (
        "(self, other):\n"
        "  if self is other: return True\n"
        "  if other.__class__ is not self.__class__: return NotImplemented\n"
        f"  return {' and '.join(same) or 'True'}"
    )


def _hash(owner: Any, _: dict[str, object]) -> str:
    values = [f"self.{field.name}," for field in fields(owner) if field.compare]
    return f"(self):\n  return hash(({' '.join(values)}))"


@reprlib.recursive_repr()
def _repr(self: Any) -> str:
    shown = [f"{field.name}={getattr(self, field.name)!r}" for field in fields(self) if field.repr]
    return f"{type(self).__qualname__}({', '.join(shown)})"


def _refuse_set(self: object, name: str, value: object) -> None:
    raise FrozenInstanceError(f"cannot assign to field {name!r}")


def _refuse_delete(self: object, name: str) -> None:
    raise FrozenInstanceError(f"cannot delete field {name!r}")


def _get_state(self: Any) -> list[Any]:
    return [getattr(self, field.name) for field in fields(self)]


def _set_state(self: Any, state: list[Any]) -> None:
    for field, value in zip(fields(self), state, strict=True):
        object.__setattr__(self, field.name, value)
