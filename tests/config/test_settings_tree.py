"""There is one set of defaults, and whatever changes a setting changes that one alone."""

import re
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Literal, cast, get_args, get_origin

import pytest
import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from esper.config.loading import compare_settings, load_settings, merge_override, put_value
from esper.config.settings import Settings, find_models
from esper.control.rules import HeuristicSettings, LookSettings, PeriodicSettings
from esper.engine.engine import GrowthConfig
from esper.errors import ConfigError, EsperError
from esper.lifecycle.rules import Rules
from esper.rl.gym import GrowthSettings
from esper.rl.rewards import MODES
from esper.train.settings import TrainSettings
from esper.train.trainer import build_settings

Dump = dict[str, Any]


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


Route = Callable[[Leaf, Path], Settings]

ROOTS: dict[type[Settings], Settings] = {
    TrainSettings: TrainSettings(),
    GrowthSettings: GrowthSettings(),
    HeuristicSettings: HeuristicSettings(),
    LookSettings: LookSettings(),
    PeriodicSettings: PeriodicSettings(),
}
"""What entry points take, and its defaults."""
_ISOLATED = "rules.operations=[wait, germinate, advance, fossilize, prune]"
NAMED = {
    "suite": Named("digits"),
    "mix": Named(["generated"]),
    "start_from": Named("runs/mine"),
    "devices": Named(["cuda:1"]),
    "device": Named("cuda:1"),
    "deterministic": Named(False, ("devices=[cuda:1]",)),
    "rules.isolation": Named("shadow", (_ISOLATED,)),
    "rules.tempos": Named([5]),
    "rules.alpha_targets": Named([0.5, 1.0]),
    "rules.alpha_speeds": Named([3]),
    "reward.mode": Named("sparse"),
    **{f"reward.{weight}": Named(0.3, ("reward.mode=shaped",)) for weight in MODES["shaped"].weights},
    "reward.early_age": Named(6, ("reward.mode=shaped",)),
}
"""Of leaves of which a type does not say what they may be."""
_MEASURED = {"every": 4, "first": 3, "examples": 64, "shown": "fitted"}
NAMED_IN: dict[type[Settings], dict[str, Named]] = {
    # Where a rule advises the policy, promises are measured as the rule wishes.
    TrainSettings: {
        "policy.advice.rule.promise.shown": Named("fitted", ("policy.advice.rule.fitted=1",)),
        **{f"growth.promise.{key}": Named(value, ("policy.advice=null",)) for key, value in _MEASURED.items()},
    }
}
LEAVES = {root: leaves_of(root, usual, NAMED | NAMED_IN.get(root, {})) for root, usual in ROOTS.items()}


def _as_yaml(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=1e9).removesuffix("...\n").strip()


def _by_key(root: type[Settings]) -> Route:
    return lambda leaf, _: load_settings(root, None, (*leaf.given, f"{leaf.key}={_as_yaml(leaf.value)}"))


def _by_mapping(root: type[Settings]) -> Route:
    def load(leaf: Leaf, _: Path) -> Settings:
        ((first, inner),) = nested(leaf.key, leaf.value).items()
        return load_settings(root, None, (*leaf.given, f"{first}={_as_yaml(inner)}"))

    return load


def _by_file(root: type[Settings]) -> Route:
    def load(leaf: Leaf, folder: Path) -> Settings:
        path = folder / "config.yaml"
        path.write_text(yaml.safe_dump(nested(leaf.key, leaf.value)))
        return load_settings(root, path, leaf.given)

    return load


def _by_call(leaf: Leaf, _: Path) -> Settings:
    given = dict(assignment.split("=", 1) for assignment in leaf.given)
    return build_settings({**{key: yaml.safe_load(text) for key, text in given.items()}, leaf.key: leaf.value})


def _by_keyword(leaf: Leaf, _: Path) -> Settings:
    keywords: dict[str, Any] = {}
    for override in leaf.given:
        merge_override(GrowthSettings, keywords, override)
    put_value(GrowthSettings, keywords, leaf.key, leaf.value, leaf.key)
    return GrowthSettings.parse(keywords)


ROUTES: dict[str, tuple[type[Settings], Route]] = {
    "esper train --set KEY=VALUE": (TrainSettings, _by_key(TrainSettings)),
    "esper train --set GROUP={...}": (TrainSettings, _by_mapping(TrainSettings)),
    "esper train --config": (TrainSettings, _by_file(TrainSettings)),
    "esper.train_controller": (TrainSettings, _by_call),
    "gymnasium.make": (GrowthSettings, _by_keyword),
    "tuned heuristic": (HeuristicSettings, _by_file(HeuristicSettings)),
    "tuned rule that looks": (LookSettings, _by_file(LookSettings)),
    "tuned periodic": (PeriodicSettings, _by_file(PeriodicSettings)),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.landing) if "sweep" in name else name for name in ROUTES]
)
def test_a_change_of_one_setting_changes_that_one_alone(name: str, tmp_path: Path) -> None:
    root, route = ROUTES[name]
    for leaf in LEAVES[root]:
        found = route(leaf, tmp_path)
        assert found.model_dump(mode="json") == leaf.after, leaf.key
        before = root.model_validate(leaf.before)
        assert [one.key for one in compare_settings(found, before)] == [leaf.key]


def reachable_classes() -> list[type[Settings]]:
    found: dict[type[Any], None] = {}
    ends: list[type[Any]] = list(ROOTS)
    while ends:
        found[one := ends.pop()] = None
        ends += [inner for field in one.model_fields.values() for inner in find_models(field.annotation)]
    return list(found)


@pytest.mark.parametrize("model", reachable_classes(), ids=lambda model: model.__name__)
def test_a_mapping_that_names_no_key_changes_nothing(model: type[Settings]) -> None:
    if any(field.is_required() for field in model.model_fields.values()):
        return  # parts of files, and numbers per head, which have no defaults of their own
    for name, field in model.model_fields.items():
        if find_models(field.annotation) and field.default is not None:
            assert model.model_validate({name: {}}) == model(), name


def test_defaults_of_an_outer_class_that_differ_from_the_inner_ones_are_kept_at_any_depth() -> None:
    class Inner(Settings):
        one: int = 1
        two: int = 2

    class Middle(Settings):
        inner: Inner = Inner(two=3)
        three: int = 3

    class Outer(Settings):
        middle: Middle = Middle(inner=Inner(one=5, two=7), three=9)

    found = Outer.model_validate({"middle": {"inner": {"one": 4}}})
    assert found == Outer(middle=Middle(inner=Inner(one=4, two=7), three=9))


def test_what_entry_points_share_has_one_default() -> None:
    train, gym = (cast("Any", ROOTS[root]) for root in (TrainSettings, GrowthSettings))
    shared = TrainSettings.model_fields.keys() & GrowthSettings.model_fields.keys()
    assert shared == {
        *("suite", "rules", "growth", "reward", "strategy", "networks_per_pass", "examples_per_pass", "bf16")
    }
    assert all(getattr(train, name) == getattr(gym, name) for name in shared)
    assert train.rules == Rules()
    assert train.growth == GrowthConfig()


def test_defaults_are_valid_and_whole() -> None:
    for root, usual in ROOTS.items():
        try:
            assert root.model_validate(usual.model_dump(mode="json")) == usual
        except ValidationError as error:
            pytest.fail(str(error))


COUNTS = [(root, leaf.key, leaf.given) for root in ROOTS for leaf in LEAVES[root] if type(leaf.value) is int]


@pytest.mark.parametrize(("root", "key", "given"), COUNTS, ids=[f"{root.__name__}-{key}" for root, key, _ in COUNTS])
def test_a_count_that_no_machine_reaches_is_refused(root: type[Settings], key: str, given: Sequence[str]) -> None:
    """Before anything is made of it."""
    with pytest.raises(ConfigError, match=rf"{re.escape(key.split('.')[-1])}.*(at most|below)"):
        load_settings(root, None, [*given, f"{key}={10**20}"])
