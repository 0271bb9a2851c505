"""YAML and JSON from files that anyone may have written: no key twice, and nothing that takes long to read.

YAML is for settings: plain data only, which do not grow beyond their text.
"""

import json
from typing import Any, cast

import yaml
from yaml.scanner import ScannerError

from esper.errors import ConfigError

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
