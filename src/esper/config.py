"""Settings from a YAML file and `--set key=value` overrides, with errors that a person can act on.

Any frozen `Settings` model will do. The file and the overrides are merged first and validated once, so an override may
also change the kind of a discriminated union. Every mistake ends in a ConfigError of one sentence.
"""

import reprlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

import tyro
import yaml
from pydantic import ValidationError

from esper.errors import ConfigError
from esper.files import write_atomically
from esper.mistakes import first_mistake
from esper.reading import read_bounded
from esper.settings import Settings
from esper.strict_yaml import MOST_BYTES, parse

S = TypeVar("S", bound=Settings)

Overrides = Annotated[
    tuple[str, ...],
    tyro.conf.UseAppendAction,
    tyro.conf.arg(name="set", metavar="KEY=VALUE", help="Override one setting; may be given many times."),
]
"""The type of a command's `--set` option, repeatable: `overrides: Overrides = ()`."""


def load_settings(model: type[S], path: Path | None, overrides: Sequence[str] = ()) -> S:
    """Build `model` from its defaults, the YAML file at `path`, and `dotted.key=value` overrides, later ones winning.

    Values of overrides are parsed as YAML.

    Raises:
        ConfigError: unreadable file, YAML mistake, unknown key, missing key, or impossible value.
    """
    values = {} if path is None else _read_mapping(path)
    for override in overrides:
        merge(values, override)
    return validated(model, values, lambda key: _source(key, path, overrides))


def validated(model: type[S], values: dict[str, Any], source: Callable[[str], str]) -> S:
    """Build `model` from its defaults and these values; ``source`` says where the value at a dotted key comes from.

    Raises:
        ConfigError: unknown key, missing key, or impossible value.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        mistake = first_mistake(error, model)
        raise ConfigError(f"{source(mistake.key)}{mistake.sentence}") from error


def dump_settings(settings: Settings, path: Path) -> None:
    """Write all settings as YAML that `load_settings` turns into an equal object; RunError if that fails."""
    write_atomically(path, settings_text(settings))


def settings_text(settings: Settings) -> str:
    """All settings as YAML."""
    # Not allow_unicode: written raw, some line separators would come back as spaces.
    return yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False)


def _read_mapping(path: Path) -> dict[str, Any]:
    try:
        content = read_bounded(path, MOST_BYTES)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error
    values = parse(content, str(path))
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold `key: value` lines, not {reprlib.repr(values)}")
    return cast("dict[str, Any]", values)


def merge(values: dict[str, Any], override: str) -> None:
    """Set what an override ``dotted.key=value`` says; ConfigError if it is none, or leads through a value."""
    key, equals, text = override.partition("=")
    if not equals:
        raise ConfigError(f"--set {override}: write it as dotted.key=value")
    put(values, key, parse(text, f"--set {override}"), f"--set {override}")


def put(values: dict[str, Any], key: str, value: Any, source: str) -> None:
    """Set the value at a dotted key; ConfigError, naming ``source``, if that is none or leads through a value."""
    parts = key.strip().split(".")
    if not all(parts):
        raise ConfigError(f"{source}: write it as dotted.key=value")
    group = values
    for depth, part in enumerate(parts[:-1], start=1):
        inner: Any = group.get(part)
        if inner is None:  # absent, or a key without a value in the file
            inner = {}
        if not isinstance(inner, dict):
            raise ConfigError(f"{source}: `{'.'.join(parts[:depth])}` is a value, it has no keys below it")
        # A copy: YAML aliases share one mapping between several keys.
        group[part] = dict(cast("dict[str, Any]", inner))
        group = group[part]
    group[parts[-1]] = value


def override_of(key: str, overrides: Sequence[str]) -> str | None:
    """The override that the value at a dotted key comes from."""
    for override in overrides:
        overridden = override.partition("=")[0].strip()
        if key == overridden or key.startswith(f"{overridden}."):
            return override
    return None


def _source(key: str, path: Path | None, overrides: Sequence[str]) -> str:
    override = override_of(key, overrides)
    if override is not None:
        return f"--set {override}: "
    return "" if path is None else f"{path}: "
