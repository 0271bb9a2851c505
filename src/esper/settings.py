"""The base of everything configurable.

There is one set of defaults: what the class at the root of a tree of settings gives. A mapping in the place of settings
changes the keys it names and nothing else, whether it comes from a keyword, a file, an override or a sweep. And one can
ask in what settings differ from others.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast, get_args

import yaml
from pydantic import BaseModel, ConfigDict, model_validator


class Settings(BaseModel):
    """Immutable, strictly keyed settings; each field's attribute docstring is its help text."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True)

    @model_validator(mode="before")
    @classmethod
    def _keys_not_named_keep_the_default(cls, given: Any) -> Any:
        """Complete mappings by the defaults of the fields that they are for."""
        if not isinstance(given, Mapping):
            return given
        return _completed(cls, cast("Mapping[str, Any]", given), {})


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """The models that an annotation mentions, for instance the members of a union."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in models_in(argument)]


def _completed(model: type[BaseModel], given: Mapping[str, Any], usual: Mapping[str, Any]) -> dict[str, Any]:
    """``usual`` values of a model, or its fields' defaults, changed at any depth where ``given`` says so."""
    values = {**usual, **given}
    for name, field in model.model_fields.items():
        default, own = usual.get(name, field.default), given.get(name)
        sole = models_in(field.annotation) == [type(default)]  # of several, a mapping may mean another one
        if sole and isinstance(default, Settings) and isinstance(own, Mapping):
            values[name] = _completed(type(default), cast("Mapping[str, Any]", own), dict(default))
    return values


class SettingDifference(NamedTuple):
    """A key with another value. Values are as YAML has them, so null stands for none."""

    key: str
    value: Any
    usual: Any

    def __str__(self) -> str:
        return f"{self.key}: {_text(self.value)} (default {_text(self.usual)})"


def compare_settings(settings: Settings, usual: Settings) -> list[SettingDifference]:
    """Where ``settings`` are not as ``usual``, in the order of their keys."""
    return list(_between("", settings.model_dump(mode="json"), usual.model_dump(mode="json")))


def shared_differences(found: Sequence[Sequence[SettingDifference]]) -> list[SettingDifference]:
    """The differences that all have, in the order of the first."""
    first, *others = found
    return [one for one in first if all(one in own for own in others)]


def _between(key: str, value: Any, usual: Any) -> Iterator[SettingDifference]:
    if isinstance(value, dict) and isinstance(usual, dict) and value.keys() == usual.keys():
        for name, inner in cast("Mapping[str, Any]", value).items():
            yield from _between(f"{key}.{name}".removeprefix("."), inner, usual[name])
    elif _alone(value) and _alone(usual):
        yield from _between(key, value[0], usual[0])
    elif value != usual:
        yield SettingDifference(key, value, usual)


def _alone(value: Any) -> bool:
    """Whether this is a list of one mapping, whose keys may be written without the list."""
    return isinstance(value, list) and len(cast("list[Any]", value)) == 1 and isinstance(value[0], dict)


def _text(value: Any) -> str:
    """In one line of YAML."""
    return yaml.safe_dump(value, default_flow_style=True, width=float("inf")).removesuffix("...\n").strip()
