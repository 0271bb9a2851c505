"""All settings of the package as a tree: its classes, its leaves, and for every leaf another value that it may have."""

import importlib
import pkgutil
import sys
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from enum import Enum
from types import ModuleType
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

import esper
from esper.config.loading import load_settings
from esper.config.settings import Settings, find_models
from esper.errors import EsperError

Dump = dict[str, Any]
_EXTRAS = ("esper.integrations", "esper.dash", "esper.lab", "esper.train.ray_workers")


@dataclass(frozen=True)
class Named:
    """What no generic function can know of a leaf: a value, and settings without which it cannot be."""

    value: Any
    given: Sequence[str] = ()
    """Overrides."""


@dataclass(frozen=True)
class Leaf:
    """A setting without keys below it, and another value for it."""

    key: str
    value: Any
    before: Dump
    """All settings but for the change, as JSON has them."""
    given: Sequence[str]
    """The overrides that led there from the defaults."""

    @property
    def after(self) -> Dump:
        """All settings with the change."""
        return changed(self.before, self.key, self.value)


def modules() -> Iterator[ModuleType]:
    """All modules of the package but those that need extras, which take long to import."""
    for found in pkgutil.walk_packages(esper.__path__, "esper."):
        if not found.name.startswith(_EXTRAS):
            yield importlib.import_module(found.name)


def settings_classes() -> list[type[Settings]]:
    """All classes of settings that those modules define, in the order of their names."""
    list(modules())
    found: dict[str, type[Settings]] = {}
    open_ends: list[type[Settings]] = [Settings]
    while open_ends:
        for one in open_ends.pop().__subclasses__():
            inside = one.__module__.startswith("esper.") and not one.__module__.startswith(_EXTRAS)
            if inside and hasattr(sys.modules[one.__module__], one.__name__):
                found[one.__qualname__] = one
                open_ends.append(one)
    return [found[name] for name in sorted(found)]


def fields_of(model: type[BaseModel], key: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """The dotted keys of all leaves, with their fields."""
    for name, field in model.model_fields.items():
        dotted = f"{key}.{name}".removeprefix(".")
        inner = find_models(field.annotation)
        if inner:
            for one in inner:
                yield from fields_of(one, dotted)
        else:
            yield dotted, field


def leaves_of(root: type[Settings], usual: Settings, named: dict[str, Named]) -> list[Leaf]:
    """Each leaf of ``root`` with another value; KeyError where nobody knows any."""
    return [_leaf(root, usual, key, field, named.get(key)) for key, field in fields_of(root)]


def _leaf(root: type[Settings], usual: Settings, key: str, field: FieldInfo, named: Named | None) -> Leaf:
    given = () if named is None else named.given
    before = (load_settings(root, None, given) if given else usual).model_dump(mode="json")
    before = root.model_validate(_with_parents(root, before, key)).model_dump(mode="json")
    now = _at(before, key)
    for value in [named.value] if named else _others(field.annotation, now):
        try:
            settings = root.model_validate(changed(before, key, value))
        except (ValidationError, EsperError):
            continue
        stored = _at(settings.model_dump(mode="json"), key)
        if stored != now:
            return Leaf(key, stored, before, given)
    raise KeyError(f"no other value is known for {key} ({now!r}): name one in the test's table")


def _with_parents(root: type[Settings], dump: Dump, key: str) -> Dump:
    """The dump with defaults in what is null above the key."""
    models: list[type[BaseModel]] = [root]
    parts = key.split(".")
    for depth, part in enumerate(parts[:-1], start=1):
        models = [inner for model in models for inner in find_models(model.model_fields[part].annotation)]
        if _at(dump, ".".join(parts[:depth])) is None:
            dump = changed(dump, ".".join(parts[:depth]), models[0]().model_dump(mode="json"))
    return dump


def _others(annotation: Any, now: Any) -> Iterator[Any]:
    """Values of this type other than ``now``, the likely ones first; some may not be valid."""
    if get_origin(annotation) is Literal:
        yield from (one for one in get_args(annotation) if one != now)
    elif isinstance(annotation, type) and issubclass(annotation, bool):
        yield not now
    elif isinstance(annotation, type) and issubclass(annotation, Enum):
        yield from (one.name.lower() for one in annotation)
        yield from (one.value for one in annotation)
    elif annotation in (int, float):
        number = now or 0
        yield from (number * 2, number / 2, number + 1, number - 1, number + 0.1, number * 0.9)
    elif get_origin(annotation) is tuple:
        yield from _other_tuples(get_args(annotation), list(now))
    else:
        for inner in get_args(annotation):
            yield from _others(inner, now)


def _other_tuples(kinds: Sequence[Any], now: list[Any]) -> Iterator[list[Any]]:
    several = kinds[1:] == (Ellipsis,)
    if several and len(now) > 1:
        yield now[:-1]
    for place, value in enumerate(now):
        for other in _others(kinds[0 if several else place], value):
            yield [*now[:place], other, *now[place + 1 :]]


def changed(dump: Dump, key: str, value: Any) -> Dump:
    """A copy with another value at a dotted key."""
    copy = deepcopy(dump)
    *parents, last = key.split(".")
    place: Any = copy
    for part in parents:
        place = _only(place[part])
    place[last] = value
    return copy


def _at(dump: Dump, key: str) -> Any:
    place: Any = dump
    for part in key.split("."):
        place = _only(place)[part]
    return place


def _only(value: Any) -> Any:
    """The settings in a list of one."""
    return value[0] if isinstance(value, list) else value


def nested(key: str, value: Any) -> Dump:
    """A mapping of mappings with that value at a dotted key."""
    first, _, rest = key.partition(".")
    return {first: nested(rest, value) if rest else value}
