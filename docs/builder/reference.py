"""The reference: a page for each part of what is public, with every name, from the docstrings in the code."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import griffe

from docs.builder.pages import ROOT
from esper.cli import COMMANDS, main
from esper.growth import blueprints

SOURCES = ROOT / "src"
WIDTH = "100"
"""Columns of a terminal for the help of commands."""


class Part(NamedTuple):
    """A page of the reference."""

    file: str
    title: str
    introduction: str
    modules: dict[str, tuple[str, ...]]
    """Public names by module; none stands for the module's ``__all__``."""


PUBLIC = (
    Part(
        "esper.md",
        "esper: grow a model",
        "What `import esper` offers. [Grow your model](../grow-your-model.md) walks through it.",
        {"esper": ()},
    ),
    Part(
        "rl.md",
        "esper.rl: learn to control growth",
        'Importing `esper.rl` makes the environment known: `gymnasium.make_vec("esper/Growth-v0", num_envs=16)`.',
        {"esper.rl": ()},
    ),
    Part(
        "blueprints.md",
        "Blueprints",
        "The modules that a seed may grow into, and what a blueprint of yours has to say of itself.",
        {"esper.growth.blueprints": (), "esper.growth.site": ("Layout", "Layer", "Site")},
    ),
    Part(
        "controllers.md",
        "Controllers and rules",
        "Who decides about growth. `esper.Grower(controller=...)` takes the names `look`, `heuristic`, `periodic`, "
        "`all_at_start`, `random`, `none` and `esper`, the directory of a run of `esper train`, or an object of yours.",
        {
            "esper.control.controller": ("Controller", "PromiseReader", "UniformStreams"),
            "esper.control.observation": ("Observation", "FeatureReader"),
            "esper.control.rules.decisions": ("ActionBuilder", "keep_or_prune"),
            "esper.control.rules.look": ("LookRule", "LookSettings"),
            "esper.control.rules.heuristic": ("Heuristic", "HeuristicSettings"),
            "esper.control.rules.schedule": ("Periodic", "PeriodicSettings", "Planting", "Schedule"),
            "esper.control.rules.simple": ("Never", "Uniform", "Replay"),
            "esper.lifecycle.actions": ("Op", "Head", "Blend", "Curve"),
            "esper.lifecycle.legality": ("ActionMasks",),
            "esper.lifecycle.stages": ("Stage",),
        },
    ),
    Part(
        "settings.md",
        "Settings",
        "Every setting with its default. [Settings](../settings.md) says which command takes which.",
        {
            "esper.lifecycle.rules": ("Rules", "Isolation"),
            "esper.training.governor": ("GovernorSettings",),
            "esper.training.budget": ("Budget",),
            "esper.control.promises": ("PromiseSettings",),
            "esper.control.policy.settings": ("PolicySettings",),
            "esper.control.advice": ("AdviceSettings",),
            "esper.practice.settings": ("GrowSettings",),
            "esper.experiments.settings": ("TrainSettings", "TelemetrySettings"),
            "esper.settings": ("Settings",),
        },
    ),
    Part(
        "suites.md",
        "Suites",
        "What controllers learn from. [A suite of your own](../suite.md#a-suite-of-your-own) is eighty lines.",
        {
            "esper.tasks.suite": ("Suite", "OptimizerSettings"),
            "esper.tasks.instance": ("Instance",),
            "esper.tasks.data": ("Data",),
            "esper.tasks.registry": ("register", "get_suite", "suite_names"),
        },
    ),
    Part(
        "integrations.md",
        "Trainers and learners",
        "Each needs the extra of its library.",
        {
            "esper.integrations.lightning": ("GrowerCallback",),
            "esper.integrations.transformers": ("GrowerCallback",),
            "esper.integrations.sb3": ("GrowthVecEnv", "ModelController"),
        },
    ),
    Part(
        "telemetry.md",
        "Runs and their events",
        "What is in a run's database, event by event and column by column, is on [a page of its own](../events.md).",
        {"esper.telemetry.reader": ("RunReader", "EventRecord"), "esper.telemetry.events": ("Event", "NetworkEvent")},
    ),
    Part("errors.md", "Errors", "All that Esper raises on purpose.", {"esper.errors": ()}),
)


def public_names() -> list[str]:
    """Every public name with its module, such as ``esper.attach``."""
    return [
        f"{module}.{name}" for part in PUBLIC for module, names in part.modules.items() for name in _all(module, names)
    ]


def find_undocumented() -> list[str]:
    """Public names, and public methods of public classes, that have no docstring."""
    return [one for name in public_names() for one in _undocumented(name, _find(name))]


def write_reference(folder: Path) -> None:
    """Write a page for each part, one of all blueprints, and one of all commands."""
    folder.mkdir(parents=True, exist_ok=True)
    for part in PUBLIC:
        lines = [f"# {part.title}", "", part.introduction, ""]
        if part.file == "blueprints.md":
            lines += _list_blueprints()
        for module, names in part.modules.items():
            lines += [line for name in _all(module, names) for line in (f"::: {module}.{name}", "")]
        (folder / part.file).write_text("\n".join(lines))
    (folder / "commands.md").write_text("\n".join(_list_commands()))


@cache
def _package() -> Any:
    loader = griffe.GriffeLoader(search_paths=[SOURCES])
    package = loader.load("esper")
    loader.resolve_aliases(implicit=True)
    return package


def _find(name: str) -> Any:
    found = _package()[name.removeprefix("esper.")]
    return found.final_target if found.is_alias else found


def _all(module: str, names: tuple[str, ...]) -> list[str]:
    """The names said, or else those that the module exports, without its modules."""
    if names:
        return list(names)
    found = _package() if module == "esper" else _find(module)
    exported = [str(name) for name in found.exports or ()]
    return [name for name in exported if not _find(f"{module}.{name}").is_module]


def _undocumented(name: str, found: Any) -> Iterator[str]:
    if not found.has_docstring:
        yield name
    if not found.is_class:
        return
    said = {member for base in _bases(found) for member in base.members}
    for member in found.members.values():
        bare = member.is_function and not member.name.startswith("_") and not member.has_docstring
        if bare and member.name not in said:
            yield f"{name}.{member.name}"


def _bases(found: Any) -> list[Any]:
    with suppress(Exception):  # griffe cannot see classes of other libraries
        return list(found.mro())
    return []


def _list_blueprints() -> Iterator[str]:
    yield from ("| name | family | layouts | what it is |", "|---|---|---|---|")
    for name in blueprints.names():
        kind = blueprints.get(name)
        layouts = ", ".join(sorted(str(layout) for layout in kind.layouts))
        first = (kind.__doc__ or "").partition("\n")[0].replace("|", "\\|")
        yield f"| `{name}` | {kind.family} | {layouts} | {first} |"
    yield ""


def _list_commands() -> Iterator[str]:
    yield from ("# Commands", "", "What `esper COMMAND --help` says.", "")
    os.environ["COLUMNS"] = WIDTH
    for command in COMMANDS:
        shown = io.StringIO()
        with redirect_stdout(shown), suppress(SystemExit):
            main([*command.name.split(), "--help"])
        yield from (f"## esper {command.name}", "", "```text", shown.getvalue().rstrip(), "```", "")
