"""The base of everything configurable."""

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """Immutable, strictly keyed settings; each field's attribute docstring is its help text."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True)
