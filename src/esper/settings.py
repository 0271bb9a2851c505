"""The base of everything configurable.

There is one set of defaults: those of the classes. A field that holds settings of another class has that class's own
defaults as its default, so that a mapping of some keys changes these keys and nothing else.
"""

from typing import Any, get_args

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """Immutable, strictly keyed settings; each field's attribute docstring is its help text."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True)


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """The models that an annotation mentions, for instance the members of a union."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in models_in(argument)]
