"""Pydantic's validation errors as sentences that a person can act on."""

import difflib
import reprlib
from dataclasses import dataclass

import annotated_types
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from esper.settings import models_in

_UNKNOWN = "extra_forbidden"
_BOUNDS = ("greater_than", "greater_than_equal", "less_than", "less_than_equal")


@dataclass(frozen=True)
class SettingError:
    """What is wrong, and at which dotted key; the key is empty where the settings as a whole are wrong."""

    key: str
    sentence: str


def describe_first_error(error: ValidationError, model: type[BaseModel]) -> SettingError:
    """The mistake to mend first: unknown keys come before all others, since they often explain them."""
    details = sorted(error.errors(include_url=False), key=lambda detail: detail["type"] != _UNKNOWN)
    first = details[0]
    place = _find(model, first)
    match first["type"]:
        case "extra_forbidden":
            sentence = f"unknown key `{place.key}`{_suggestion(place)}"
        case "missing":
            sentence = f"key `{place.key}` is missing"
        case "value_error":
            # The message of a model's own validator names what it needs; the whole group as a value would bury it.
            message = first["msg"].removeprefix("Value error, ")
            sentence = f"`{place.key}`: {message}" if place.key else message
        case _:
            # A value that fits no member of a union is reported once per member.
            demands = [_demand(other, detail) for detail in details if (other := _find(model, detail)).key == place.key]
            value = reprlib.repr(first["input"])
            sentence = f"`{place.key}` is {value}, but {' or '.join(dict.fromkeys(demands))}"
    return SettingError(place.key, sentence)


@dataclass(frozen=True)
class _Place:
    """Where in the settings an error happened, and which keys are known beside it."""

    key: str
    field: FieldInfo | None
    siblings: list[str]


def _find(model: type[BaseModel], detail: ErrorDetails) -> _Place:
    """Follow pydantic's location, leaving out the names of union members that it contains."""
    models = [model]
    parts: list[str] = []
    field: FieldInfo | None = None
    siblings: list[str] = []
    last = len(detail["loc"]) - 1
    for index, part in enumerate(detail["loc"]):
        if isinstance(part, int):
            parts.append(f"[{part}]")
            continue
        holders = [holder for holder in models if part in holder.model_fields]
        unknown = index == last and detail["type"] == _UNKNOWN
        if not holders and not unknown:
            continue
        siblings = sorted({name for holder in models for name in holder.model_fields})
        parts.append(f".{part}")
        if holders:
            field = holders[0].model_fields[part]
            models = [inner for holder in holders for inner in models_in(holder.model_fields[part].annotation)]
    return _Place("".join(parts).removeprefix("."), field, siblings)


def _suggestion(place: _Place) -> str:
    *parents, name = place.key.split(".")
    near = difflib.get_close_matches(name, place.siblings, n=1)
    if near:
        return f", did you mean `{'.'.join([*parents, near[0]])}`?"
    return f", known here: {', '.join(place.siblings)}"


def _demand(place: _Place, detail: ErrorDetails) -> str:
    if detail["type"] in _BOUNDS and place.field is not None and (bounds := _bounds(place.field)):
        return f"must be {bounds}"
    if detail["type"] == "model_type" and place.field is not None:
        names = dict.fromkeys(name for model in models_in(place.field.annotation) for name in model.model_fields)
        return f"must be a mapping of {', '.join(names)}"
    message = detail["msg"].replace("Input should", "must", 1)
    return message[:1].lower() + message[1:]


def _bounds(field: FieldInfo) -> str:
    """The range of a field in words, empty where it has none."""
    words: list[str] = []
    for bound in field.metadata:
        match bound:
            case annotated_types.Ge(ge=limit):
                words.append(f"at least {limit}")
            case annotated_types.Gt(gt=limit):
                words.append(f"above {limit}")
            case annotated_types.Le(le=limit):
                words.append(f"at most {limit}")
            case annotated_types.Lt(lt=limit):
                words.append(f"below {limit}")
            case _:
                pass
    return " and ".join(words)
