"""Arguments of public functions, checked by pydantic against type hints, with a sentence for what does not fit."""

from __future__ import annotations

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
"""How pydantic reads arguments: "10" is no number, and 1 is not True."""
LARGEST = 2**63 - 1
"""The largest whole number that is taken."""


@dataclass(frozen=True)
class Advice:
    """Metadata of a type hint: what to give where something else was given."""

    text: str


def read_number(value: object) -> float:
    """A number, or a tensor or array that holds a single one; what is too large for a float is infinite.

    Raises:
        ValueError: it is something else.
    """
    plain: Any = value
    if (isinstance(value, Tensor) and value.numel() == 1) or (isinstance(value, np.ndarray) and value.size == 1):
        plain = cast("Tensor", value).item()
    if isinstance(plain, bool) or not isinstance(plain, Real):
        raise ValueError("no number")
    try:
        return float(plain)
    except OverflowError:
        return math.inf if cast(int, plain) > 0 else -math.inf


def _read_integer(value: Any) -> int:
    """Tensors and numbers of numpy's that are whole, too, but neither True nor False."""
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise ValueError("no whole number")


def _read_path(value: Any) -> Path:
    text = cast("object", os.fspath(cast("Any", value)) if isinstance(value, str | os.PathLike) else None)
    if not isinstance(text, str) or not text:
        raise ValueError("no path")
    return Path(text)


def _require_batches(value: Any) -> Any:
    if isinstance(value, str | bytes | Mapping | Tensor | nn.Module) or not isinstance(value, Iterable):
        raise ValueError("no batches")
    return cast("Any", value)


_INTEGER = BeforeValidator(_read_integer)
_NUMBER = BeforeValidator(read_number)
NonNegativeInt = Annotated[int, _INTEGER, Field(ge=0, le=LARGEST), Advice(f"give a whole number from 0 to {LARGEST}")]
PositiveInt = Annotated[int, _INTEGER, Field(ge=1, le=LARGEST), Advice("give a whole number from 1 on")]
AtLeastTwo = Annotated[int, _INTEGER, Field(ge=2, le=LARGEST), Advice("give a whole number from 2 on")]
NonNegativeFloat = Annotated[float, _NUMBER, Field(ge=0, allow_inf_nan=False), Advice("give a number from 0 on")]
Flops = Annotated[float, _NUMBER, Field(gt=0, allow_inf_nan=False), Advice("give a number of FLOPs above 0")]
Seconds = Annotated[float, _NUMBER, Field(gt=0, allow_inf_nan=False), Advice("give a number of seconds above 0")]
Name = Annotated[str, Field(min_length=1), Advice("give a name")]
FilePath = Annotated[str | os.PathLike[str], PlainValidator(_read_path), Advice("give a path")]
Batches = Annotated[
    Iterable[Any],
    PlainValidator(_require_batches),
    Advice("give batches as loss(model, batch) takes them, such as a DataLoader or a list"),
]


class _Arguments(BaseModel):
    model_config = ARGUMENTS


def check_arguments(
    error: type[EsperError], base: type[BaseModel] = _Arguments, **advice: str
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Refuse arguments that do not fit the function's type hints, by raising ``error`` with a sentence.

    How many there are and what they are called is Python's own affair, and so are defaults.

    Args:
        error: What to raise.
        base: Settings whose fields say what arguments of the same name may be, instead of the hints.
        advice: By argument what to give, where that says more than the hint.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        signature = inspect.signature(function)

        @functools.cache
        def build_model() -> type[BaseModel]:
            # At the first call, when all that the hints name is there.
            hints = get_type_hints(function, include_extras=True)
            fields = {
                one.name: (hints[one.name], Field(None, validate_default=False))
                for one in signature.parameters.values()
                if one.name in hints and one.name not in base.model_fields
                if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
            }
            return create_model(function.__qualname__, __base__=base, **cast("Any", fields))

        @functools.wraps(function)
        def call(*arguments: P.args, **keywords: P.kwargs) -> T:
            bound, model = signature.bind(*arguments, **keywords), build_model()
            values = {name: value for name, value in bound.arguments.items() if name in model.model_fields}
            try:
                checked = model.model_validate(values)
            except ValidationError as failure:
                raise error(describe_argument_error(failure, values, model, advice)) from None
            bound.arguments.update((name, getattr(checked, name)) for name in values)
            return function(*bound.args, **bound.kwargs)

        return call

    return decorate


_RANGE_ERRORS = ("greater_than", "greater_than_equal", "less_than_equal", "finite_number", "literal_error", "enum")
"""Pydantic's types of errors about values of the right type."""


def describe_argument_error(
    failure: ValidationError, values: Mapping[str, Any], model: type[BaseModel], advice: Mapping[str, str]
) -> str:
    """The sentence about the first argument that does not fit: which one, what it is, and what to give."""
    first = failure.errors(include_url=False, include_input=False)[0]
    if not first["loc"]:
        return first["msg"].removeprefix("Value error, ")  # of arguments that do not fit each other
    name = str(first["loc"][0])
    field, value = model.model_fields[name], values[name]
    if len(first["loc"]) > 1 and find_models(field.annotation):
        return describe_first_error(failure, model).sentence
    shown = show(value) if first["type"] in _RANGE_ERRORS else describe(value)
    expected = advice.get(name) or _find_advice((*field.metadata, field.annotation))
    expected = expected or first["msg"].replace("Input should be", "give").replace("a valid boolean", "True or False")
    optional = NoneType in get_args(field.annotation)
    return f"{name} is {shown}: {expected}{', or leave it out' if optional else ''}"


def _find_advice(parts: Sequence[Any]) -> str:
    """The text of the outermost `Advice` in type hints or their metadata; empty if there is none."""
    texts = (part.text if isinstance(part, Advice) else _find_advice(get_args(part)) for part in reversed(parts))
    return next(filter(None, texts), "")


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
    shown = f", {show(value)}" if kind.__module__ == "builtins" else ""
    return f"{article} {kind.__name__}{shown}"


def show(value: object) -> str:
    """A value as Python writes it, shortened."""
    try:
        return reprlib.repr(value)
    except ValueError:  # of whole numbers with too many digits
        return "too large to be shown"
