"""Settings from a YAML file and `--set` overrides, with errors that a person can act on.

Any frozen `Settings` model will do. The file and the overrides are merged first and validated once, so an override may
also change the kind of a discriminated union. Every mistake ends in a ConfigError of one sentence.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

import tyro
import yaml
from pydantic import BaseModel, ValidationError
from yaml.scanner import ScannerError

from esper.config.settings import Settings, describe_first_error, find_models
from esper.errors import ConfigError
from esper.files import read_bounded, write_atomically

MOST_BYTES = 64 * 2**10
"""Far above any settings; what is longer takes seconds to parse."""
DEEPEST = 50
"""Levels of brackets. The time that the scanner takes grows with their square."""
LONGEST_NUMBER = 400
"""Characters. Longer ones take quadratic time to read or to print."""

_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_MERGE = "tag:yaml.org,2002:merge"


def parse_yaml(text: bytes | str, source: str) -> Any:
    """The value that ``text`` stands for; ``source`` names it in messages.

    Raises:
        ConfigError: it is not YAML, or not of the plain kind that settings need.
    """
    if len(text) > MOST_BYTES:
        raise ConfigError(f"{source} is too long for settings: at most {MOST_BYTES} bytes are read")
    try:
        return yaml.load(text, _StrictLoader)  # noqa: S506 (a SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = "" if mark is None else f" line {mark.line + 1}, column {mark.column + 1}"
        raise ConfigError(f"{source}{where}: {error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{source} is not YAML text: {str(error).splitlines()[0]}") from error
    except RecursionError as error:
        raise ConfigError(f"{source} is nested too deeply") from error
    # PyYAML leaks these for a value that contradicts its explicit tag, such as `!!bool maybe`, or an impossible date.
    except (ValueError, LookupError, AttributeError, TypeError) as error:
        raise ConfigError(f"{source} holds a value that does not fit its YAML tag: {error}") from error


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice instead of dropping the first, and what could take long."""

    def fetch_flow_collection_start(self, TokenClass: type[yaml.Token]) -> None:
        if self.flow_level >= DEEPEST:
            raise ScannerError(None, None, "brackets are nested too deeply", cast("yaml.Mark", self.get_mark()))
        super().fetch_flow_collection_start(TokenClass)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        if node.tag in _NUMBERS and isinstance(node, yaml.ScalarNode) and len(node.value) > LONGEST_NUMBER:
            raise _refusal(f"a number of {len(node.value)} characters is too long", node)
        return cast("Any", super().construct_object(node, deep))

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            if isinstance(key_node, yaml.ScalarNode):
                if key_node.value in seen:
                    raise _refusal(f"key {key_node.value!r} is given twice", key_node)
                seen.add(key_node.value)
        return super().construct_mapping(node, deep)

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        # Merges of merges double a few lines into gigabytes.
        for key_node, _ in node.value:
            if key_node.tag == _MERGE:
                raise _refusal("`<<` is not understood here, write the keys out", key_node)
        super().flatten_mapping(node)


def _refusal(problem: str, node: yaml.Node) -> yaml.MarkedYAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


def parse_json(text: bytes) -> Any:
    """The value that ``text`` stands for.

    Raises:
        ValueError: it is no JSON, nested too deeply, or gives a key twice.
    """
    try:
        return json.loads(text, object_pairs_hook=_without_repeats)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("a key is given twice")
    return values


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
        merge_override(model, values, override)
    return validate_settings(model, values, lambda key: _source(key, path, overrides))


def validate_settings(model: type[S], values: dict[str, Any], source: Callable[[str], str]) -> S:
    """Build `model` from its defaults and these values; ``source`` says where the value at a dotted key comes from.

    Raises:
        ConfigError: unknown key, missing key, or impossible value.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        mistake = describe_first_error(error, model)
        raise ConfigError(f"{source(mistake.key)}{mistake.sentence}") from error
    except UnicodeEncodeError as error:  # of what a check says of half a character, which YAML's escapes can spell
        raise ConfigError(f"a value of the settings is no text: {error.object!r}") from error


def dump_settings(settings: Settings, path: Path) -> None:
    """Write all settings as YAML that `load_settings` turns into an equal object; RunError if that fails."""
    write_atomically(path, format_settings(settings))


def format_settings(settings: Settings) -> str:
    """All settings as YAML."""
    # Not allow_unicode: written raw, some line separators would come back as spaces.
    return yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False)


def _read_mapping(path: Path) -> dict[str, Any]:
    try:
        content = read_bounded(path, MOST_BYTES)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error
    values = parse_yaml(content, str(path))
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold `key: value` lines, not {reprlib.repr(values)}")
    return cast("dict[str, Any]", values)


def merge(model: type[Settings], values: dict[str, Any], override: str) -> None:
    """Change what an override ``dotted.key=value`` of ``model`` names, and nothing else.

    Raises:
        ConfigError: it is no such override, or leads through a value.
    """
    key, equals, text = override.partition("=")
    if not equals:
        raise ConfigError(f"--set {override}: write it as dotted.key=value")
    put_value(model, values, key, parse_yaml(text, f"--set {override}"), f"--set {override}")


def put(model: type[Settings], values: dict[str, Any], key: str, value: Any, source: str) -> None:
    """Put the value at a dotted key of ``model``; a mapping changes its keys where those are settings of their own.

    Raises:
        ConfigError: that is no key, or it leads through a value. The message names ``source``.
    """
    parts = key.strip().split(".")
    if not all(parts):
        raise ConfigError(f"{source}: write it as dotted.key=value")
    models: Sequence[type[BaseModel]] = [model]
    for depth, part in enumerate(parts[:-1], start=1):
        is_field, inner = any(part in one.model_fields for one in models), _models_below(models, part)
        if not isinstance(_at(values, part), dict) or (is_field and not inner):
            above = ".".join(parts[:depth])
            raise ConfigError(f"{source}: `{above}` is a value, it has no keys below it; give it whole")
        models, values = inner, _enter(values, part)
    _put(models, values, parts[-1], value)


def _put(models: Sequence[type[BaseModel]], values: dict[str, Any], key: str, value: Any) -> None:
    """Put the value at a key of ``values``, whose meaning ``models`` say; none where nobody knows it."""
    inner = _models_below(models, key)
    if inner and isinstance(value, dict) and isinstance(values.get(key), dict):
        below = _enter(values, key)
        for name, part in cast("dict[str, Any]", value).items():
            _put(inner, below, name, part)
    else:
        values[key] = value


def _models_below(models: Sequence[type[BaseModel]], key: str) -> list[type[BaseModel]]:
    fields = [model.model_fields[key] for model in models if key in model.model_fields]
    return [inner for field in fields for inner in find_models(field.annotation)]


def _at(values: dict[str, Any], key: str) -> Any:
    """What is at a key; no keys where it is absent, or a key without a value in the file."""
    return {} if values.get(key) is None else values[key]


def _enter(values: dict[str, Any], key: str) -> dict[str, Any]:
    """The mapping at a key, as a copy of its own: YAML aliases share one mapping between several keys."""
    values[key] = dict(_at(values, key))
    return values[key]


def find_override(key: str, overrides: Sequence[str]) -> str | None:
    """The override that the value at a dotted key comes from."""
    for override in overrides:
        overridden = override.partition("=")[0].strip()
        if key == overridden or key.startswith(f"{overridden}."):
            return override
    return None


def _source(key: str, path: Path | None, overrides: Sequence[str]) -> str:
    override = find_override(key, overrides)
    if override is not None:
        return f"--set {override}: "
    return "" if path is None else f"{path}: "
