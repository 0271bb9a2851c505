"""Arguments of public functions, checked by pydantic against their type hints; a mistake becomes one sentence."""

import functools
import inspect
import math
import operator
import os
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, ParamSpec, TypeVar, cast, get_args, get_type_hints

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, ValidationError, create_model
from torch import Tensor, nn

from esper.config.settings import describe_first_error, find_models
from esper.errors import EsperError

P = ParamSpec("P")
T = TypeVar("T")

ARGUMENTS = ConfigDict(arbitrary_types_allowed=True, strict=True)
"""Pydantic's configuration for arguments: "10" is not a number, and 1 is not True."""
LARGEST = 2**63 - 1
"""The largest integer that arguments may be."""


@dataclass(frozen=True)
class Advice:
    """Metadata of a type hint: the end of an error message, which names valid values."""

    text: str


def read_number(value: object) -> float:
    """Convert a number, or a tensor or array of one element, to a float; integers too large for it become infinite."""
    number: Any = value
    if (isinstance(value, Tensor) and value.numel() == 1) or (isinstance(value, np.ndarray) and value.size == 1):
        number = cast("Tensor", value).item()
    if isinstance(number, bool) or not isinstance(number, Real):
        raise ValueError("no number")
    try:
        return float(number)
    except OverflowError:
        return math.inf if cast(int, number) > 0 else -math.inf


def _read_integer(value: Any) -> int:
    """Convert an integer of Python, NumPy or torch; True and False are refused."""
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise ValueError("no whole number")


def _read_path(value: Any) -> Path:
    text = cast("object", os.fspath(cast("Any", value)) if isinstance(value, str | os.PathLike) else None)
    if not isinstance(text, str) or not text or b"\0" in os.fsencode(text):  # a ValueError, too, if it has no encoding
        raise ValueError("no path")
    return Path(text)


def _require_batches(value: Any) -> Any:
    if isinstance(value, str | bytes | Mapping | Tensor | nn.Module) or not isinstance(value, Iterable):
        raise ValueError("no batches")
    return cast("Any", value)


_INTEGER = BeforeValidator(_read_integer)
_NUMBER = BeforeValidator(read_number)
NonNegativeInt = Annotated[int, _INTEGER, Field(ge=0, le=LARGEST), Advice(f"give a whole number from 0 to {LARGEST}")]
PositiveInt = Annotated[int, _INTEGER, Field(ge=1, le=LARGEST), Advice("give a whole number of at least 1")]
AtLeastTwo = Annotated[int, _INTEGER, Field(ge=2, le=LARGEST), Advice("give a whole number of at least 2")]
NonNegativeFloat = Annotated[float, _NUMBER, Field(ge=0, allow_inf_nan=False), Advice("give a number of at least 0")]
Flops = Annotated[float, _NUMBER, Field(gt=0, allow_inf_nan=False), Advice("give a number of FLOPs above 0")]
Seconds = Annotated[float, _NUMBER, Field(gt=0, allow_inf_nan=False), Advice("give a number of seconds above 0")]
Name = Annotated[str, Field(min_length=1), Advice("give a name")]
FilePath = Annotated[str | os.PathLike[str], PlainValidator(_read_path), Advice("give a path")]
Batches = Annotated[
    Iterable[Any],
    PlainValidator(_require_batches),
    Advice("give batches as loss(model, batch) takes them, such as a DataLoader or a list"),
]


def check_arguments(error: type[EsperError], **advice: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorator that checks a function's arguments against its type hints, and raises ``error`` with a sentence.

    Missing and unknown arguments are left to Python. Defaults are not checked. ``advice`` says by argument what to
    give, where that is more specific than the hint's `Advice`.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        signature = inspect.signature(function)

        @functools.cache
        def build_model() -> type[BaseModel]:
            # At the first call, when every name in the hints is defined.
            hints = get_type_hints(function, include_extras=True)
            fields = {
                name: (hints[name], Field(None, validate_default=False))
                for name, parameter in signature.parameters.items()
                if name in hints
                if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
            }
            return create_model(function.__qualname__, __config__=ARGUMENTS, **cast("Any", fields))

        @functools.wraps(function)
        def call(*arguments: P.args, **keywords: P.kwargs) -> T:
            # Python itself refuses missing and unknown arguments here, but does not name the function.
            try:
                bound, model = signature.bind(*arguments, **keywords), build_model()
            except TypeError as failure:
                raise TypeError(f"{function.__qualname__.removesuffix('.__init__')}: {failure}") from None
            values = {name: value for name, value in bound.arguments.items() if name in model.model_fields}
            try:
                checked = model.model_validate(values)
            except ValidationError as failure:
                raise error(describe_argument_error(failure, values, model, advice)) from None
            # The function gets the converted values, for instance a path for a text.
            bound.arguments.update((name, getattr(checked, name)) for name in values)
            return function(*bound.args, **bound.kwargs)

        return call

    return decorate


_RANGE_ERRORS = ("greater_than", "greater_than_equal", "less_than_equal", "finite_number", "literal_error", "enum")
"""Pydantic's errors about values that have the right type: the message then shows the value without its type."""


def describe_argument_error(
    failure: ValidationError, values: Mapping[str, Any], model: type[BaseModel], advice: Mapping[str, str]
) -> str:
    """The sentence about the first invalid argument: its name, its value, and what to give."""
    first = failure.errors(include_url=False, include_input=False)[0]
    if not first["loc"]:
        return first["msg"].removeprefix("Value error, ")  # arguments that contradict each other
    name = str(first["loc"][0])
    field, value = model.model_fields[name], values[name]
    if len(first["loc"]) > 1 and find_models(field.annotation):
        return describe_first_error(failure, model).sentence
    text = show_value(value) if first["type"] in _RANGE_ERRORS else describe_value(value)
    # What to give: the function's advice, the hint's, or else pydantic's message.
    expected = advice.get(name) or _find_advice((*field.metadata, field.annotation))
    expected = expected or first["msg"].replace("Input should be", "give").replace("a valid boolean", "True or False")
    optional = NoneType in get_args(field.annotation)
    return f"{name} is {text}: {expected}{', or omit it' if optional else ''}"


def _find_advice(parts: Sequence[Any]) -> str:
    """The text of the outermost `Advice` in type hints or their metadata; empty if there is none."""
    texts = (part.text if isinstance(part, Advice) else _find_advice(get_args(part)) for part in reversed(parts))
    return next(filter(None, texts), "")


def describe_value(value: object) -> str:
    """A short description of a value, its type first."""
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
    text = f", {show_value(value)}" if kind.__module__ == "builtins" else ""
    return f"{article} {kind.__name__}{text}"


def show_value(value: object) -> str:
    """A value's repr, shortened."""
    try:
        return reprlib.repr(value)
    except ValueError:  # Python refuses to print integers of too many digits
        return "too large to be shown"
