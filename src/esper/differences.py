"""In what settings differ from others of their class, by dotted key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import yaml

from esper.settings import Settings


class Difference(NamedTuple):
    """A key with another value. Values are as YAML has them, so null stands for none."""

    key: str
    value: Any
    usual: Any

    def __str__(self) -> str:
        return f"{self.key}: {_text(self.value)} (default {_text(self.usual)})"


def differences(settings: Settings, usual: Settings) -> list[Difference]:
    """Where ``settings`` are not as ``usual``, in the order of their keys."""
    return list(_between("", settings.model_dump(mode="json"), usual.model_dump(mode="json")))


def shared(found: Sequence[Sequence[Difference]]) -> list[Difference]:
    """The differences that all have, in the order of the first."""
    first, *others = found
    return [one for one in first if all(one in own for own in others)]


def _between(key: str, value: Any, usual: Any) -> Iterator[Difference]:
    if isinstance(value, dict) and isinstance(usual, dict) and value.keys() == usual.keys():
        for name, inner in cast("Mapping[str, Any]", value).items():
            yield from _between(f"{key}.{name}".removeprefix("."), inner, usual[name])
    elif _alone(value) and _alone(usual):
        yield from _between(key, value[0], usual[0])
    elif value != usual:
        yield Difference(key, value, usual)


def _alone(value: Any) -> bool:
    """Whether this is a list of one mapping, whose keys may be written without the list."""
    return isinstance(value, list) and len(cast("list[Any]", value)) == 1 and isinstance(value[0], dict)


def _text(value: Any) -> str:
    """In one line of YAML."""
    return yaml.safe_dump(value, default_flow_style=True, width=float("inf")).removesuffix("...\n").strip()
