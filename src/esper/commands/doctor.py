"""`esper doctor`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import Distribution, PackageNotFoundError, distribution, version
from typing import Any

import numpy as np
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from torch.utils.collect_env import get_pretty_env_info

from esper import __version__
from esper.commands.options import RUNS
from esper.control.rules import Uniform
from esper.dash.output import console_beside, print_json, print_line
from esper.dash.reporter import report_progress
from esper.errors import TaskError
from esper.extras import DISTRIBUTION, build_install_command
from esper.lifecycle.legality import legal_actions
from esper.lifecycle.rules import Rules
from esper.lifecycle.table import Evidence
from esper.numerics.devices import list_devices
from esper.population.learning import stack_data, train
from esper.population.population import STRATEGIES, Population
from esper.rl.episodes import Episodes
from esper.runs.database import file_system_of, wal_safe
from esper.tasks.instance import Data
from esper.tasks.registry import FILE_SUITES, get_suite, suite_names
from esper.train.workers import prepare_process

TOLERANCE = 1e-6
"""The largest difference of a parameter, in double precision, that is attributed to rounding, which is far smaller."""


def command(json: bool = False) -> int:
    """Check this installation and this machine, with a self-test of a few seconds. Exits with 1 if there is a problem.

    Args:
        json: Print a final line of JSON.
    """
    console = console_beside(json)
    record: dict[str, Any] = {"torch": get_pretty_env_info().partition("\nCPU:")[0], "versions": {}, "extras": {}}
    problems: list[str] = []
    print_line(console, record["torch"])

    # Packages beside the ranges that Esper declares for them.
    try:
        esper = distribution(DISTRIBUTION)
    except PackageNotFoundError:
        problems.append("Esper is not installed, so its requirements cannot be checked: run `pip install -e .`")
    else:
        record["versions"] = {
            "esper": __version__,
            **{package.name: find_version(package) for package in list_requirements(esper)},
        }
        print_line(console, "versions: " + ", ".join(f"{name} {number}" for name, number in record["versions"].items()))
        for package in filter(is_unmet, list_requirements(esper)):
            installed = find_version(package)
            state = f"{installed} is not a version Esper supports" if installed else "is not installed"
            problems.append(f"{package.name} {state}: `pip install '{package.name}{package.specifier}'`")
        for extra in sorted(esper.metadata.get_all("Provides-Extra") or []):
            unmet = filter(is_unmet, list_requirements(esper, extra))
            lacking = sorted(f"{package.name}{package.specifier}" for package in unmet)
            install = build_install_command(esper, extra)
            record["extras"][extra] = {"lacking": lacking, "install": install}
            print_line(
                console, f"extra {extra}: " + (f"lacks {', '.join(lacking)}: {install}" if lacking else "complete")
            )

    # Devices, and whether a population computes the same on each as its networks one by one.
    record["devices"] = {}
    for device in list_devices():
        print_line(console, f"{device}: comparing stacked and looped training ...")
        try:
            with report_progress(console, f"{device}, in decisions") as progress:
                difference = compare_strategies(torch.device(device), progress.update)
        except RuntimeError as error:
            reason = str(error).strip().partition("\n")[0]
            problems.append(f"torch cannot compute on {device} ({reason}): use another device, or repair its driver")
            continue
        record["devices"][device] = difference if np.isfinite(difference) else None
        print_line(console, f"{device}: largest difference of a parameter {difference:.0e}")
        if not difference <= TOLERANCE:
            problems.append(
                f"on {device} stacked and looped networks differ by {difference:.1e}, more than {TOLERANCE:.0e}: "
                "set strategy=looped and report this with the output of `esper doctor --json`"
            )

    # Data sets.
    record["data"] = {}
    for suite in suite_names():
        source = get_suite(suite).source
        record["data"][suite] = source.description
        print_line(console, f"suite {suite}: {source.description}")
        if not source.exists:
            problems.append(f"suite {suite}: {source.path} is missing ({source.description}): reinstall it")
    for suite in FILE_SUITES:
        try:
            description = get_suite(suite).source.description
        except TaskError as error:
            description = f"not available: {error}"
        print_line(console, f"suite {suite}: {description}")

    # The folder of runs, or its nearest parent if it is not there yet.
    runs = RUNS.absolute()
    nearest = next(place for place in (runs, *runs.parents) if place.exists())
    kind = file_system_of(nearest)
    record["runs"] = {"path": str(runs), "file_system": kind, "wal_safe": wal_safe(kind)}
    print_line(console, f"runs are stored in {runs} (file system: {kind or 'unknown'})")
    try:
        tempfile.TemporaryFile(dir=nearest).close()
    except OSError as error:
        reason = error.strerror or error
        problems.append(f"no run can be written to {runs} ({reason}): choose another folder with --run-dir")
    if wal_safe(kind) is False:
        advice = "choose a folder on a local disk with --run-dir"
        problems.append(f"{runs} is on {kind}, where SQLite may lose data: {advice}")

    for line in [f"problem: {problem}" for problem in problems] or ["no problems found"]:
        print_line(console, line)
    if json:
        print_json({**record, "problems": problems})
    return 1 if problems else 0


def list_requirements(esper: Distribution, extra: str = "") -> Iterator[Requirement]:
    """The requirements of the core, or those that an extra adds, including other extras of Esper that it names."""
    for requirement in map(Requirement, esper.requires or []):
        marker = requirement.marker
        in_core = marker is None or marker.evaluate({"extra": ""})
        if in_core if not extra else not in_core and marker is not None and marker.evaluate({"extra": extra}):
            if canonicalize_name(requirement.name) == DISTRIBUTION:
                for other in sorted(requirement.extras):
                    yield from list_requirements(esper, other)
            else:
                yield requirement


def find_version(requirement: Requirement) -> str | None:
    """The installed version of a package, or None."""
    try:
        return version(requirement.name)
    except PackageNotFoundError:
        return None


def is_unmet(requirement: Requirement) -> bool:
    """Whether a package is missing, or its installed version is out of range."""
    installed = find_version(requirement)
    return installed is None or not requirement.specifier.contains(installed, prereleases=True)


def compare_strategies(
    device: torch.device, report: Callable[[int, int], None], networks: int = 16, decisions: int = 8
) -> float:
    """The largest difference of a parameter between the same networks trained and grown stacked and looped.

    ``report`` is called with how many decisions are done, of how many.
    """
    prepare_process()
    suite = get_suite(suite_names()[0])
    episodes = Episodes(suite, suite.sample(networks, "train", np.random.default_rng(0)), Rules(), device=device)
    data = [suite.data(instance, "train") for instance in episodes.instances]
    size = suite.batch_size
    batch = stack_data([Data(part.inputs[:size], part.labels[:size]) for part in data], device)
    batch = batch._replace(inputs=batch.inputs.double())
    controller, observation = Uniform(), episodes.observe()
    trained: list[Population] = []
    for strategy in STRATEGIES:
        config = replace(episodes.population.config, strategy=strategy, dtype=torch.float64)
        population = Population(config, episodes.population.specs.networks)
        shape = population.table.stage.shape
        # Evidence that lets every gate pass, so that the legal actions, and the choices, do not depend on rounding.
        sound = np.ones(shape, np.bool_)
        evidence = replace(
            Evidence.none(*shape), probed=sound, gradient_healthy=sound, contribution=np.zeros(shape, np.float32)
        )
        states = controller.start(range(networks))
        for decision in range(decisions):
            report(len(trained) * decisions + decision, len(STRATEGIES) * decisions)
            population.evidence = evidence
            masks = legal_actions(population.table, evidence, config.rules, population.specs.compatible)
            actions, states = controller.act(observation, masks, states)
            population.decide(actions)
            train(population, [batch] * suite.batches_per_step)
        trained.append(population)
    stacked, looped = (population.flat.values for population in trained)
    return (stacked - looped).abs().amax().item()
