"""The base of everything configurable, in which every mistake becomes one sentence.

There is one set of defaults: those of the class at the root of a tree of settings. A mapping in the place of nested
settings changes the keys it names and nothing else, whether it comes from a keyword, a mapping, a file or an override.
"""

import reprlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, cast, get_args

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from esper.errors import did_you_mean

MOST_AT_ONCE = 100_000
"""Bound of settings and options that say how much is made at once, such as networks."""
LARGEST_COUNT = 10**9
"""Bound of settings that are only counted to, such as iterations."""


class Settings(BaseModel):
    """Immutable, strictly keyed settings; each field's attribute docstring is its help text."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True)

    @model_validator(mode="before")
    @classmethod
    def _fill_in_defaults(cls, values: Any) -> Any:
        """Complete nested mappings by the defaults of the fields that they are for."""
        if not isinstance(values, Mapping):
            return values
        return _complete(cls, cast("Mapping[str, Any]", values), {})


def find_models(annotation: Any) -> list[type[BaseModel]]:
    """The models that an annotation mentions, for instance the members of a union."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in find_models(argument)]


def _complete(model: type[BaseModel], changes: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """``defaults`` of a model, or those of its fields, with ``changes`` at any depth."""
    values = {**defaults, **changes}
    for name, field in model.model_fields.items():
        default, change = defaults.get(name, field.default), changes.get(name)
        # Where a field may hold several models, a mapping may be meant for another one than the default.
        has_one_model = find_models(field.annotation) == [type(default)]
        if has_one_model and isinstance(default, Settings) and isinstance(change, Mapping):
            inner = cast("Mapping[str, Any]", change)
            values[name] = _complete(type(default), inner, dict(default))
    return values


# Mistakes as sentences.

_UNKNOWN_KEY = "extra_forbidden"
_BOUNDS: Mapping[type, str] = {Ge: "at least", Gt: "above", Le: "at most", Lt: "below"}
_BOUND_ERRORS = ("greater_than", "greater_than_equal", "less_than", "less_than_equal")


@dataclass(frozen=True)
class SettingError:
    """A mistake at a dotted key; the key is empty where the settings as a whole are wrong."""

    key: str
    sentence: str


def describe_first_error(error: ValidationError, model: type[BaseModel]) -> SettingError:
    """The mistake to correct first: unknown keys come before all others, since they often explain them."""
    details = sorted(error.errors(include_url=False), key=lambda detail: detail["type"] != _UNKNOWN_KEY)
    first = details[0]
    key, _, siblings = _locate(model, first)
    match first["type"]:
        case "extra_forbidden":
            parent, dot, name = key.rpartition(".")
            hint = did_you_mean(name, siblings, spell=lambda near: f"`{parent}{dot}{near}`", limit=1, separator=",")
            sentence = f"unknown key `{key}`" + (hint or f", known here: {', '.join(siblings)}")
        case "missing":
            sentence = f"key `{key}` is missing"
        case "value_error":
            # The message of a model's own validator names what it needs; the whole group as a value would bury it.
            message = first["msg"].removeprefix("Value error, ")
            sentence = f"`{key}`: {message}" if key else message
        case _:
            # A value that fits no member of a union is reported once per member.
            located = [(*_locate(model, detail), detail) for detail in details]
            demands = [_describe_demand(field, detail) for other, field, _, detail in located if other == key]
            value = reprlib.repr(first["input"])
            sentence = f"`{key}` is {value}, but {' or '.join(dict.fromkeys(demands))}"
    return SettingError(key, sentence)


def _locate(model: type[BaseModel], detail: ErrorDetails) -> tuple[str, FieldInfo | None, list[str]]:
    """The key of an error, without the names of union members in it; its field; and the valid keys beside it."""
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
        is_unknown = index == last and detail["type"] == _UNKNOWN_KEY
        if not holders and not is_unknown:
            continue
        siblings = sorted({name for holder in models for name in holder.model_fields})
        parts.append(f".{part}")
        if holders:
            field = holders[0].model_fields[part]
            models = [inner for holder in holders for inner in find_models(holder.model_fields[part].annotation)]
    return "".join(parts).removeprefix("."), field, siblings


def _describe_demand(field: FieldInfo | None, detail: ErrorDetails) -> str:
    """What a value must be, as the end of a sentence."""
    if field is not None and detail["type"] in _BOUND_ERRORS and (bounds := _describe_bounds(field)):
        return f"must be {bounds}"
    if field is not None and detail["type"] == "model_type":
        names = dict.fromkeys(name for model in find_models(field.annotation) for name in model.model_fields)
        return f"must be a mapping of {', '.join(names)}"
    message = detail["msg"].replace("Input should", "must", 1)
    return message[:1].lower() + message[1:]


def _describe_bounds(field: FieldInfo) -> str:
    """The range of a field, as in "at least 1 and below 4"; empty where it has none."""
    bounds = [
        f"{_BOUNDS[type(bound)]} {limit}"
        for bound in field.metadata
        if type(bound) in _BOUNDS
        for limit in asdict(bound).values()
    ]
    return " and ".join(bounds)
