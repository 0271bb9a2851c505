"""Settings from a YAML file and `--set` overrides, and how two settings differ.

The file and the overrides are merged first and validated once, so an override may also change the kind of a
discriminated union. Every mistake is a ConfigError of one sentence.
"""

import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import yaml
from pydantic import BaseModel, ValidationError
from yaml.constructor import ConstructorError
from yaml.scanner import ScannerError

from esper.config.settings import Settings, describe_first_error, find_models
from esper.errors import ConfigError
from esper.files import read_bounded, write_atomically

MOST_BYTES = 64 * 2**10
"""The largest file that is read: more takes seconds to parse."""
DEEPEST = 50
"""Most levels of brackets, with whose square the scanner's time grows."""
LONGEST_NUMBER = 400
"""Most characters of a number, with whose square the time to read or print it grows."""

_NUMBER_TAGS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_MERGE_TAG = "tag:yaml.org,2002:merge"


def parse_yaml(text: bytes | str, source: str) -> Any:
    """Parse YAML; ``source`` names the text in messages."""
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
    """SafeLoader that refuses duplicate keys, where PyYAML drops the first, and text that takes long to read."""

    def fetch_flow_collection_start(self, TokenClass: type[yaml.Token]) -> None:
        if self.flow_level >= DEEPEST:
            raise ScannerError(None, None, "brackets are nested too deeply", cast("yaml.Mark", self.get_mark()))
        super().fetch_flow_collection_start(TokenClass)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        if node.tag in _NUMBER_TAGS and isinstance(node, yaml.ScalarNode) and len(node.value) > LONGEST_NUMBER:
            raise ConstructorError(None, None, f"a number of {len(node.value)} characters is too long", node.start_mark)
        return cast("Any", super().construct_object(node, deep))

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            if isinstance(key_node, yaml.ScalarNode):
                if key_node.value in seen:
                    raise ConstructorError(None, None, f"key {key_node.value!r} is given twice", key_node.start_mark)
                seen.add(key_node.value)
        return super().construct_mapping(node, deep)

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        # Merges of merges double a few lines into gigabytes.
        for key_node, _ in node.value:
            if key_node.tag == _MERGE_TAG:
                problem = "`<<` is not understood here, write the keys out"
                raise ConstructorError(None, None, problem, key_node.start_mark)
        super().flatten_mapping(node)


S = TypeVar("S", bound=Settings)


def load_settings(model: type[S], path: Path | None, overrides: Sequence[str] = ()) -> S:
    """Build `model` from its defaults, the YAML file at `path` and `dotted.key=value` overrides; later values win.

    Values of overrides are parsed as YAML.
    """
    values = {} if path is None else _read_mapping(path)
    for override in overrides:
        merge_override(model, values, override)

    def describe_source(key: str) -> str:
        for override in overrides:
            target, _, text = override.partition("=")
            if f"{key}.".startswith(f"{target.strip()}."):
                return f"--set {target.strip()}={text}: "
        return "" if path is None else f"{path}: "

    return validate_settings(model, values, describe_source)


def validate_settings(model: type[S], values: dict[str, Any], describe_source: Callable[[str], str]) -> S:
    """Build `model` from its defaults and ``values``. Messages begin with where the key of a mistake comes from."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        mistake = describe_first_error(error, model)
        raise ConfigError(f"{describe_source(mistake.key)}{mistake.sentence}") from error
    except UnicodeEncodeError as error:  # a validator's message quotes half a character, which YAML's escapes allow
        raise ConfigError(f"a value of the settings is no text: {error.object!r}") from error


def dump_settings(settings: Settings, path: Path) -> None:
    """Write all settings as YAML."""
    write_atomically(path, format_settings(settings))


def format_settings(settings: Settings) -> str:
    """All settings as YAML, from which `load_settings` builds an equal object."""
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


def merge_override(model: type[Settings], values: dict[str, Any], override: str) -> None:
    """Change the value that an override ``dotted.key=value`` names."""
    key, equals, text = override.partition("=")
    source = f"--set {override}"
    if not equals:
        raise ConfigError(f"{source}: write it as dotted.key=value")
    put_value(model, values, key, parse_yaml(text, source), source)


def put_value(model: type[Settings], values: dict[str, Any], key: str, value: Any, source: str) -> None:
    """Put a value at a dotted key. A mapping in the place of nested settings changes the keys that it names."""
    parts = key.strip().split(".")
    if not all(parts):
        raise ConfigError(f"{source}: write it as dotted.key=value")
    # Walk down the keys, through models where they are known and through plain mappings elsewhere.
    models: Sequence[type[BaseModel]] = [model]
    prefix = ""
    for part in parts[:-1]:
        is_field, inner = any(part in holder.model_fields for holder in models), _find_models_below(models, part)
        below: Any = {} if values.get(part) is None else values[part]
        if not isinstance(below, dict) or (is_field and not inner):
            raise ConfigError(f"{source}: `{prefix}{part}` is a value, it has no keys below it; give it whole")
        # A copy, because YAML aliases share one mapping between several keys.
        values[part] = dict(cast("dict[str, Any]", below))
        models, values, prefix = inner, values[part], f"{prefix}{part}."
    _put(models, values, parts[-1], value)


def _put(models: Sequence[type[BaseModel]], values: dict[str, Any], key: str, value: Any) -> None:
    """Put the value at a key of ``values``, which ``models`` describe if there are any."""
    inner = _find_models_below(models, key)
    if inner and isinstance(value, dict) and isinstance(values.get(key), dict):
        values[key] = dict(values[key])
        for name, part in cast("dict[str, Any]", value).items():
            _put(inner, values[key], name, part)
    else:
        values[key] = value


def _find_models_below(models: Sequence[type[BaseModel]], key: str) -> list[type[BaseModel]]:
    fields = [model.model_fields[key] for model in models if key in model.model_fields]
    return [inner for field in fields for inner in find_models(field.annotation)]


# Differences between settings.


class SettingDifference(NamedTuple):
    """A key with another value. Values are as YAML has them, so null stands for none."""

    key: str
    value: Any
    default: Any

    def __str__(self) -> str:
        value, default = (
            yaml.safe_dump(each, default_flow_style=True, width=float("inf")).removesuffix("...\n").strip()
            for each in (self.value, self.default)
        )
        return f"{self.key}: {value} (default {default})"


def compare_settings(settings: Settings, default: Settings) -> list[SettingDifference]:
    """The keys whose values in ``settings`` differ from ``default``, in the order of the fields."""
    return list(_compare_values("", settings.model_dump(mode="json"), default.model_dump(mode="json")))


def _compare_values(key: str, value: Any, default: Any) -> Iterator[SettingDifference]:
    if isinstance(value, dict) and isinstance(default, dict) and value.keys() == default.keys():
        for name, inner in cast("Mapping[str, Any]", value).items():
            yield from _compare_values(f"{key}.{name}".removeprefix("."), inner, default[name])
    elif _is_single_mapping(value) and _is_single_mapping(default):
        yield from _compare_values(key, value[0], default[0])
    elif value != default:
        yield SettingDifference(key, value, default)


def _is_single_mapping(value: Any) -> bool:
    """Whether this is a list of one mapping, whose keys may be written without the list."""
    return isinstance(value, list) and len(cast("list[Any]", value)) == 1 and isinstance(value[0], dict)
