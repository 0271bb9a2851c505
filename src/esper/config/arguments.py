"""What arguments of public functions may be: said once for each, and a sentence for whatever else is given."""

from __future__ import annotations

import functools
import inspect
import math
import operator
import os
import reprlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import numpy as np
from torch import Tensor

from esper.errors import EsperError

P = ParamSpec("P")
T = TypeVar("T")

LARGEST = 2**63 - 1
"""The largest whole number that is taken."""


@dataclass(frozen=True)
class Kind:
    """What an argument may be."""

    read: Callable[[Any], Any]
    """What is meant by a value, such as an int by an integer of numpy's.

    Raises TypeError where it is of another kind, ValueError where it is out of range.
    """
    advice: str
    """What to give."""

    def taken(self, name: str, value: object, error: type[EsperError]) -> Any:
        """What is meant by the value of the argument ``name``; raises ``error`` where it is none of this kind."""
        try:
            return self.read(value)
        except TypeError:
            found = describe(value)
        except ValueError:
            found = _show(value)
        raise error(f"{name} is {found}: {self.advice}")


def check_arguments(error: type[EsperError], **kinds: Kind) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Refuse arguments of the function that are not of their kinds, by raising ``error`` with a sentence.

    How many there are and what they are called is Python's own affair, and so are defaults.
    """

    def decorated(function: Callable[P, T]) -> Callable[P, T]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*arguments: P.args, **keywords: P.kwargs) -> T:
            given = signature.bind(*arguments, **keywords)
            for name, kind in kinds.items():
                if name in given.arguments:
                    given.arguments[name] = kind.taken(name, given.arguments[name], error)
            return function(*given.args, **given.kwargs)

        return call

    return decorated


def instance(*types: type, advice: str, but: tuple[type, ...] = ()) -> Kind:
    """Objects of these types, ``but`` none of those."""

    def read(value: Any) -> Any:
        if not isinstance(value, types) or isinstance(value, but):
            raise TypeError
        return value

    return Kind(read, advice)


def callable_(advice: str) -> Kind:
    """Functions and whatever else can be called."""

    def read(value: Any) -> Any:
        if not callable(value):
            raise TypeError
        return value

    return Kind(read, advice)


def whole(least: int, advice: str) -> Kind:
    """Whole numbers from ``least`` to `LARGEST`; tensors and numbers of numpy's that are whole, too."""

    def read(value: Any) -> int:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
        if not least <= number <= LARGEST:
            raise ValueError
        return number

    return Kind(read, advice)


def amount(advice: str) -> Kind:
    """Finite numbers from 0 on."""

    def read(value: Any) -> float:
        found = number(value)
        if not 0 <= found < math.inf:
            raise ValueError
        return found

    return Kind(read, advice)


def positive(advice: str) -> Kind:
    """A finite number above 0."""

    def read(value: Any) -> float:
        found = number(value)
        if not (math.isfinite(found) and found > 0):
            raise ValueError
        return found

    return Kind(read, advice)


def one_of(choices: Iterable[str]) -> Kind:
    """The members of an enumeration by name, or one of these words."""
    named = {str(choice): choice for choice in choices}

    def read(value: Any) -> str:
        if not isinstance(value, str):
            raise TypeError
        if value not in named:
            raise ValueError
        return named[value]

    return Kind(read, f"give one of {', '.join(named)}")


def name_of(what: str) -> Kind:
    """Text that is not empty."""

    def read(value: Any) -> str:
        if not isinstance(value, str):
            raise TypeError
        if not value:
            raise ValueError
        return value

    return Kind(read, f"give the name of {what}")


def optional(kind: Kind) -> Kind:
    """Such, or None."""
    return Kind(lambda value: None if value is None else kind.read(value), f"{kind.advice}, or leave it out")


def truth() -> Kind:
    """True or False."""
    return instance(bool, advice="give True or False")


def file_path(advice: str) -> Kind:
    """Paths, also as text."""

    def read(value: Any) -> Path:
        if not isinstance(value, str | os.PathLike) or isinstance(os.fspath(cast("Any", value)), bytes):
            raise TypeError
        if not os.fspath(cast("Any", value)):
            raise ValueError
        return Path(cast("str | os.PathLike[str]", value))

    return Kind(read, advice)


def number(value: object) -> float:
    """A number, or a tensor or array that holds a single one; what is too large for a float is infinite.

    Raises:
        TypeError: it is something else.
    """
    plain: Any = value
    if (isinstance(value, Tensor) and value.numel() == 1) or (isinstance(value, np.ndarray) and value.size == 1):
        plain = cast("Tensor", value).item()
    if isinstance(plain, bool) or not isinstance(plain, Real):
        raise TypeError
    try:
        return float(plain)
    except OverflowError:
        return math.inf if cast(int, plain) > 0 else -math.inf


def describe(value: object) -> str:
    """A value in a few words, its type first."""
    if value is None:
        return "None"
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and type {value.dtype}"
    if isinstance(value, np.ndarray):
        array = cast("np.ndarray[Any, Any]", value)
        return f"an array of shape {array.shape} and type {array.dtype}"
    if isinstance(value, Mapping):
        return f"a mapping with the keys {reprlib.repr(list(cast('Mapping[Any, Any]', value)))}"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    kind = type(value)
    article = "an" if kind.__name__[0] in "AEIOUaeiou" else "a"
    shown = f", {_show(value)}" if kind.__module__ == "builtins" else ""
    return f"{article} {kind.__name__}{shown}"


def _show(value: object) -> str:
    try:
        return reprlib.repr(value)
    except ValueError:  # of whole numbers with too many digits
        return "too large to be shown"
