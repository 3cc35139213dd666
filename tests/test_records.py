"""Dataclasses whose methods are compiled when they are used do what the standard ones do."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from collections.abc import Callable
from dataclasses import FrozenInstanceError, field, replace
from typing import Any, ClassVar, get_type_hints

import pytest

from zarr_manifests import records


def classes(dataclass: Callable[..., Any]) -> dict[str, Any]:
    """The same classes, made by this decorator."""

    @dataclass(frozen=True, slots=True)
    class Range:
        offset: int
        length: int = 7
        parts: list[int] = field(default_factory=list, compare=False)
        end: int = field(init=False, repr=False)
        seen: int = field(init=False, default=3)
        many: ClassVar[int] = 5

        def __post_init__(self) -> None:
            object.__setattr__(self, "end", self.offset + self.length)

    @dataclass(frozen=True, slots=True)
    class Named(Range):
        name: str = "n"

    @dataclass(slots=True, kw_only=True)
    class Loose:
        a: int = 0
        b: dict[str, int] = field(default_factory=dict, init=False)

    @dataclass(frozen=True, slots=True, eq=False, repr=False)
    class Same:
        a: int

    @dataclass(frozen=True, weakref_slot=True, slots=True)
    class Empty:
        pass

    @dataclass(frozen=True, init=False)
    class Own:
        a: int

        def __init__(self) -> None:
            object.__setattr__(self, "a", 1)

        def __repr__(self) -> str:
            return "own"

        def __eq__(self, other: object) -> bool:
            return True

    made = [Range, Named, Loose, Same, Empty, Own]
    return {kind.__name__: kind for kind in made}


@records.dataclass(frozen=True, slots=True)
class Pair:
    a: int
    b: list[int] = field(default_factory=list, compare=False)


CALLS: list[Callable[[dict[str, Any]], Any]] = [
    lambda of: repr(of["Range"](4)),
    lambda of: repr(of["Named"](4, parts=[1], name="x")),
    lambda of: repr(of["Loose"](a=2)),
    lambda of: repr((of["Empty"](), of["Own"]())),
    lambda of: of["Same"].__repr__ is object.__repr__,
    lambda of: of["Range"](4).__reduce_ex__(4)[2],
    lambda of: (of["Range"](4).end, of["Range"](4).seen, of["Range"].many),
    lambda of: of["Range"](4).parts is of["Range"](4).parts,
    lambda of: (of["Range"](1) == of["Range"](1, parts=[2]), of["Range"](1) == of["Range"](2)),
    lambda of: (of["Named"](1) == of["Range"](1), of["Range"](1) != 1),
    lambda of: (of["Same"](1) == of["Same"](1), of["Own"]() == 3, of["Empty"]() == of["Empty"]()),
    lambda of: hash(of["Range"](1, 2)) == hash(of["Range"](1, 2, [3])),
    lambda of: hash(of["Range"](1, 2)),
    lambda of: (hash(of["Empty"]()), hash(of["Own"]())),
    lambda of: hash(of["Loose"]()),
    lambda of: of["Loose"].__hash__,
    lambda of: of["Range"](),
    lambda of: of["Range"](1, end=3),
    lambda of: of["Loose"](1),
    lambda of: setattr(of["Range"](1), "offset", 2),
    lambda of: delattr(of["Range"](1), "offset"),
    lambda of: setattr(of["Own"](), "a", 2),
    lambda of: setattr(of["Loose"](), "c", 2),
    lambda of: repr(replace(of["Named"](1, 2), offset=3)),
    lambda of: replace(of["Range"](1), end=3),
    lambda of: dataclasses.asdict(of["Range"](1)),
    lambda of: [(f.name, f.type, f.init, f.kw_only) for f in dataclasses.fields(of["Named"])],
    lambda of: [kind.__match_args__ for kind in of.values()],
    lambda of: [getattr(kind, "__slots__", None) for kind in of.values()],
    lambda of: [str(inspect.signature(kind)) for kind in of.values()],
    lambda of: str(inspect.signature(of["Range"](1).__eq__)),
    lambda of: get_type_hints(of["Range"].__init__)["offset"],
    lambda of: of["Range"].__init__.__qualname__,
    lambda of: repr(copy.deepcopy(of["Named"](1, 2, [3]))),
]


def outcome(call: Callable[[dict[str, Any]], Any], of: dict[str, Any]) -> object:
    try:
        return call(of)
    except (TypeError, AttributeError, ValueError) as error:
        return type(error), str(error)


@pytest.mark.parametrize("at", range(len(CALLS)))
def test_each_use_comes_to_the_same_as_with_the_standard_decorator(at: int) -> None:
    ours, standard = classes(records.dataclass), classes(dataclasses.dataclass)
    for _ in range(2):  # what is called first is compiled by the call
        assert outcome(CALLS[at], ours) == outcome(CALLS[at], standard)


def test_pickled_records_are_equal_and_frozen() -> None:
    again = pickle.loads(pickle.dumps(Pair(1, [2])))
    assert (again, again.b) == (Pair(1), [2])
    with pytest.raises(FrozenInstanceError):
        again.a = 2


def test_a_class_that_nobody_uses_has_nothing_compiled() -> None:
    ours = classes(records.dataclass)
    left = {name: vars(kind)["__init__"] for name, kind in ours.items()}
    ours["Named"](1)
    assert [name for name, kind in ours.items() if vars(kind)["__init__"] is not left[name]] == [
        "Named"
    ]
