"""The base of everything configurable.

There is one set of defaults: what the class at the root of a tree of settings gives. A mapping in the place of settings
changes the keys it names and nothing else, whether it comes from a keyword, a file, an override or a sweep. One can ask
in what settings differ from others; and what is wrong with settings is a sentence that a person can act on.
"""

import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast, get_args

import annotated_types
import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from esper.errors import did_you_mean


class Settings(BaseModel):
    """Immutable, strictly keyed settings; each field's attribute docstring is its help text."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True)

    @model_validator(mode="before")
    @classmethod
    def _keys_not_named_keep_the_default(cls, values: Any) -> Any:
        """Complete mappings by the defaults of the fields that they are for."""
        if not isinstance(values, Mapping):
            return values
        return _complete(cls, cast("Mapping[str, Any]", values), {})


def find_models(annotation: Any) -> list[type[BaseModel]]:
    """The models that an annotation mentions, for instance the members of a union."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in find_models(argument)]


def _complete(model: type[BaseModel], given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """``defaults`` values of a model, or its fields' defaults, changed at any depth where ``given`` says so."""
    values = {**defaults, **given}
    for name, field in model.model_fields.items():
        default, own = defaults.get(name, field.default), given.get(name)
        sole = find_models(field.annotation) == [type(default)]  # of several, a mapping may mean another one
        if sole and isinstance(default, Settings) and isinstance(own, Mapping):
            values[name] = _complete(type(default), cast("Mapping[str, Any]", own), dict(default))
    return values


class SettingDifference(NamedTuple):
    """A key with another value. Values are as YAML has them, so null stands for none."""

    key: str
    value: Any
    default: Any

    def __str__(self) -> str:
        return f"{self.key}: {_text(self.value)} (default {_text(self.default)})"


def compare_settings(settings: Settings, default: Settings) -> list[SettingDifference]:
    """Where ``settings`` are not as ``default``, in the order of their keys."""
    return list(_between("", settings.model_dump(mode="json"), default.model_dump(mode="json")))


def _between(key: str, value: Any, default: Any) -> Iterator[SettingDifference]:
    if isinstance(value, dict) and isinstance(default, dict) and value.keys() == default.keys():
        for name, inner in cast("Mapping[str, Any]", value).items():
            yield from _between(f"{key}.{name}".removeprefix("."), inner, default[name])
    elif _alone(value) and _alone(default):
        yield from _between(key, value[0], default[0])
    elif value != default:
        yield SettingDifference(key, value, default)


def _alone(value: Any) -> bool:
    """Whether this is a list of one mapping, whose keys may be written without the list."""
    return isinstance(value, list) and len(cast("list[Any]", value)) == 1 and isinstance(value[0], dict)


def _text(value: Any) -> str:
    """A value in one line of YAML."""
    return yaml.safe_dump(value, default_flow_style=True, width=float("inf")).removesuffix("...\n").strip()


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
            models = [inner for holder in holders for inner in find_models(holder.model_fields[part].annotation)]
    return _Place("".join(parts).removeprefix("."), field, siblings)


def _suggestion(place: _Place) -> str:
    *parents, name = place.key.split(".")
    hint = did_you_mean(name, place.siblings, spell=lambda near: f"`{'.'.join([*parents, near])}`", most=1, mark=",")
    return hint or f", known here: {', '.join(place.siblings)}"


def _demand(place: _Place, detail: ErrorDetails) -> str:
    if detail["type"] in _BOUNDS and place.field is not None and (bounds := _bounds(place.field)):
        return f"must be {bounds}"
    if detail["type"] == "model_type" and place.field is not None:
        names = dict.fromkeys(name for model in find_models(place.field.annotation) for name in model.model_fields)
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
