"""The base of everything configurable.

There is one set of defaults: what the class at the root of a tree of settings gives. A mapping in the place of settings
changes the keys it names and nothing else, whether it comes from a keyword, a file, an override or a sweep.
"""

from collections.abc import Mapping
from typing import Any, cast, get_args

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
