"""Everything that `esper doctor` examines, and what is wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from esper.experiments.doctor.devices import Device, devices
from esper.experiments.doctor.machine import Machine, this_machine
from esper.experiments.doctor.memory import SuiteMemory, suite_memory
from esper.experiments.doctor.packages import Packages, installed_packages
from esper.experiments.doctor.runs_folder import RunsFolder, examine_folder
from esper.experiments.doctor.self_test import SelfTest, self_test
from esper.tasks.registry import get_suite, suite_names


@dataclass(frozen=True)
class SuiteData:
    """Where a suite's data come from."""

    suite: str
    source: str
    path: str | None
    """The file that is read; None where nothing is."""
    found: bool


@dataclass(frozen=True)
class Diagnosis:
    """What was found. All is well if there are no problems."""

    machine: Machine
    packages: Packages | None
    devices: tuple[Device, ...]
    self_test: tuple[SelfTest, ...]
    data: tuple[SuiteData, ...]
    memory: tuple[SuiteMemory, ...]
    """Of the suites whose data are there."""
    runs: RunsFolder
    problems: tuple[str, ...]
    """Each a sentence that says what to do."""


def examine(runs: Path) -> Diagnosis:
    """Examine this installation on this machine; ``runs`` is the folder where runs go."""
    machine, packages, found = this_machine(), installed_packages(), devices()
    folder, data = examine_folder(runs), suites_data()
    memory = tuple(suite_memory(one.suite, found, machine.available_memory) for one in data if one.found)
    tests, failures = _self_tests(found)
    problems = (
        *_package_problems(packages),
        *failures,
        *_disagreements(tests),
        *(f"suite {one.suite} finds no {one.path}: reinstall what it is {one.source}" for one in data if not one.found),
        *_folder_problems(folder),
    )
    return Diagnosis(machine, packages, found, tests, data, memory, folder, problems)


def suites_data() -> tuple[SuiteData, ...]:
    """Of every suite, as it declares itself."""
    sources = [(name, get_suite(name).source()) for name in suite_names()]
    return tuple(
        SuiteData(name, source.words, None if source.path is None else str(source.path), source.found)
        for name, source in sources
    )


def _self_tests(found: Sequence[Device]) -> tuple[tuple[SelfTest, ...], tuple[str, ...]]:
    """The tests that ran, and a sentence for each device on which none did."""
    tests: list[SelfTest] = []
    failures: list[str] = []
    for device in found:
        try:
            tests.append(self_test(torch.device(device.name)))
        except RuntimeError as error:
            reason = str(error).strip().partition("\n")[0]
            failures.append(f"torch cannot compute on {device.name} ({reason}): use another device, or mend its driver")
    return tuple(tests), tuple(failures)


def _disagreements(tests: Sequence[SelfTest]) -> Iterator[str]:
    for test in tests:
        if not test.agrees:
            difference = "not finite" if test.difference is None else f"{test.difference:.1e}"
            yield (
                f"on {test.device} stacked and looped networks differ by {difference}, more than {test.tolerance:.0e}: "
                "set strategy=looped and report this with the output of `esper doctor --json`"
            )


def _package_problems(packages: Packages | None) -> Iterator[str]:
    if packages is None:
        yield "Esper is not installed, so its requirements are unknown: `pip install -e .` in its folder"
        return
    for package in packages.core:
        if not package.fits:
            state = "is not installed" if package.installed is None else f"{package.installed} does not suit Esper"
            yield f"{package.name} {state}: `pip install '{package.name}{package.required}'`"


def _folder_problems(folder: RunsFolder) -> Iterator[str]:
    if folder.obstacle is not None:
        yield f"no run can be written to {folder.path} ({folder.obstacle}): choose another folder with --run-dir"
    if folder.wal_safe is False:
        yield (
            f"{folder.path} lies on {folder.file_system}, where SQLite may lose what a run records: "
            "choose a folder on a local disk with --run-dir"
        )
