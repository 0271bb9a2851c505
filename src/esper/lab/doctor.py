"""What `esper doctor` examines: what torch's and pip's own reports do not say of an installation and a machine.

Whether the packages are in the ranges that Esper declares, whether a population computes the same as its networks one
by one, how much memory a network takes and so how many fit, whether data are there, and whether runs are safe where
they go.
"""

from __future__ import annotations

import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from importlib.metadata import Distribution, PackageNotFoundError, distribution, version
from pathlib import Path

import numpy as np
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from torch import Tensor

from esper.control.rules.simple import Uniform
from esper.extras import DISTRIBUTION, command_for
from esper.lifecycle.legality import legal_actions
from esper.lifecycle.rules import Rules
from esper.lifecycle.table import Evidence
from esper.numerics.devices import devices_here
from esper.population.evaluation import evaluate
from esper.population.learning import Batch, stack_data, train
from esper.population.parameters import SeedKind
from esper.population.population import STRATEGIES, Fossils, Population, Strategy
from esper.population.prefix_sharing import forward_variants, toggle_slots
from esper.rl.episodes import Episodes
from esper.runs.database import file_system_of, wal_safe
from esper.tasks.data import Data
from esper.tasks.registry import get_suite, suite_names
from esper.tasks.suite import Source, Suite
from esper.train.process_pool import prepare_process

MEMINFO = Path("/proc/meminfo")
_SEED = 0


@dataclass(frozen=True)
class Diagnosis:
    """What was found. All is well if there are no problems."""

    packages: tuple[Package, ...]
    extras: tuple[Extra, ...]
    devices: tuple[Device, ...]
    self_test: tuple[SelfTest, ...]
    data: dict[str, Source]
    """By suite."""
    memory: tuple[SuiteMemory, ...]
    """Of the suites whose data are there."""
    runs: RunsFolder
    problems: tuple[str, ...]
    """Each a sentence that says what to do."""


def examine(runs: Path) -> Diagnosis:
    """Examine this installation on this machine; ``runs`` is the folder where runs go."""
    packages, extras = installed_packages()
    devices, folder = find_devices(), examine_folder(runs)
    data = {name: get_suite(name).source for name in suite_names()}
    memory = tuple(suite_memory(name, devices) for name, source in data.items() if source.found)
    tests: list[SelfTest] = []
    failures: list[str] = []
    for device in devices:
        try:
            tests.append(self_test(torch.device(device.name)))
        except RuntimeError as error:
            reason = str(error).strip().partition("\n")[0]
            failures.append(f"torch cannot compute on {device.name} ({reason}): use another device, or mend its driver")
    problems = [
        *_package_problems(packages),
        *failures,
        *(one.problem for one in tests),
        *(
            None if source.found else f"suite {name} finds no {source.path}: reinstall what it is {source.words}"
            for name, source in data.items()
        ),
        *folder.problems,
    ]
    found = tuple(problem for problem in problems if problem is not None)
    return Diagnosis(packages, extras, devices, tuple(tests), data, memory, folder, found)


@dataclass(frozen=True)
class Package:
    """A package beside the range that Esper declares for it."""

    name: str
    required: str
    """As in ``>=2.9,<2.14``; empty where any will do."""
    installed: str | None
    fits: bool

    @property
    def problem(self) -> str | None:
        """What is wrong with it."""
        if self.fits:
            return None
        state = "is not installed" if self.installed is None else f"{self.installed} does not suit Esper"
        return f"{self.name} {state}: `pip install '{self.name}{self.required}'`"


@dataclass(frozen=True)
class Extra:
    """An optional part of Esper."""

    name: str
    lacking: tuple[str, ...]
    """Requirements that are not met."""
    install: str
    """The command that completes it."""


def installed_packages() -> tuple[tuple[Package, ...], tuple[Extra, ...]]:
    """What Esper's metadata ask for, core and extras; nothing if Esper itself is not installed."""
    try:
        esper = distribution(DISTRIBUTION)
    except PackageNotFoundError:
        return (), ()
    core = sorted((_package(one) for one in _requirements(esper, "")), key=lambda one: one.name)
    names = esper.metadata.get_all("Provides-Extra") or []
    return tuple(core), tuple(_extra(esper, name) for name in sorted(names))


def _requirements(esper: Distribution, extra: str) -> Iterator[Requirement]:
    """What the core needs, or what an extra adds to it; an extra may name others of Esper's extras."""
    for requirement in map(Requirement, esper.requires or []):
        marker = requirement.marker
        in_core = marker is None or marker.evaluate({"extra": ""})
        if in_core if not extra else not in_core and marker is not None and marker.evaluate({"extra": extra}):
            if canonicalize_name(requirement.name) == DISTRIBUTION:
                for other in sorted(requirement.extras):
                    yield from _requirements(esper, other)
            else:
                yield requirement


def _package(requirement: Requirement) -> Package:
    try:
        installed = version(requirement.name)
    except PackageNotFoundError:
        installed = None
    fits = installed is not None and requirement.specifier.contains(installed, prereleases=True)
    return Package(canonicalize_name(requirement.name), str(requirement.specifier), installed, fits)


def _extra(esper: Distribution, name: str) -> Extra:
    packages = [_package(requirement) for requirement in _requirements(esper, name)]
    lacking = sorted({f"{package.name}{package.required}" for package in packages if not package.fits})
    return Extra(name, tuple(lacking), command_for(esper, name))


def _package_problems(packages: Sequence[Package]) -> list[str | None]:
    if not packages:
        return ["Esper is not installed, so its requirements are unknown: `pip install -e .` in its folder"]
    return [package.problem for package in packages]


@dataclass(frozen=True)
class Device:
    """What torch can compute on."""

    name: str
    """As torch names it."""
    model: str
    memory: int | None
    """Bytes; of the CPU those that the machine has left. None where the system does not tell."""


def find_devices() -> tuple[Device, ...]:
    """The CPU and every accelerator."""
    return tuple(_device(name) for name in devices_here())


def _device(name: str) -> Device:
    device = torch.device(name)
    if device.type == "cuda":
        return Device(name, torch.cuda.get_device_name(device), torch.cuda.mem_get_info(device)[1])
    if device.type == "cpu":
        return Device(name, torch.backends.cpu.get_cpu_capability(), _available_memory())
    return Device(name, device.type, None)


def _available_memory() -> int | None:
    """Bytes that the machine has left; None elsewhere than on Linux."""
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB$", MEMINFO.read_text(), re.MULTILINE)
    except OSError:
        return None
    return None if found is None else int(found[1]) * 1024


NETWORKS = 16
DECISIONS = 8
WARM_UP = 3
"""Decisions before anything is timed."""
TOLERANCE = 1e-6
"""The largest difference of a parameter in double precision: rounding stays far below it, so it hides no mistake."""


@dataclass(frozen=True)
class SelfTest:
    """How the two ways of running the same networks compare on one device."""

    device: str
    seeds: int
    """That live at the end."""
    blended: int
    """Of those, seeds that count in their network's output."""
    difference: float | None
    """Largest difference of a parameter after training in double precision; None if it is not finite."""
    agrees: bool
    stacked_seconds: float
    """Of the same decisions in single precision, as training computes."""
    looped_seconds: float
    faster: Strategy

    @property
    def problem(self) -> str | None:
        """What is wrong with the device, or with Esper on it."""
        if self.agrees:
            return None
        difference = "not finite" if self.difference is None else f"{self.difference:.1e}"
        return (
            f"on {self.device} stacked and looped networks differ by {difference}, more than {TOLERANCE:.0e}: "
            "set strategy=looped and report this with the output of `esper doctor --json`"
        )


def self_test(device: torch.device) -> SelfTest:
    """Train the same networks with the same seeds and actions both ways, in one thread, as training does.

    Raises:
        RuntimeError: torch cannot compute on the device.
    """
    prepare_process()
    suite = get_suite(suite_names()[0])
    instances = suite.sample(NETWORKS, "train", np.random.default_rng(_SEED))
    episodes = Episodes(suite, instances, Rules(), device=device)
    grown = {strategy: _grow(episodes, strategy, torch.float64)[0] for strategy in STRATEGIES}
    seconds = {strategy: _grow(episodes, strategy, torch.float32)[1] for strategy in STRATEGIES}
    pairs = zip(grown["stacked"].flat.blocks, grown["looped"].flat.blocks, strict=True)
    difference = torch.stack([(one.values - other.values).abs().amax() for one, other in pairs]).amax().item()
    return SelfTest(
        str(device),
        seeds=int(grown["looped"].table.owning.sum()),
        blended=int(grown["looped"].table.blended.sum()),
        difference=difference if np.isfinite(difference) else None,
        agrees=difference <= TOLERANCE,
        stacked_seconds=seconds["stacked"],
        looped_seconds=seconds["looped"],
        faster=min(STRATEGIES, key=lambda strategy: seconds[strategy]),
    )


def _grow(episodes: Episodes, strategy: Strategy, dtype: torch.dtype) -> tuple[Population, float]:
    """The episodes' networks after some decisions of a random controller, and the seconds that the last ones took."""
    plan = replace(episodes.population.config, strategy=strategy, dtype=dtype)
    population = Population(plan, episodes.population.specs.networks)
    minibatch, validation = (
        batch._replace(inputs=batch.inputs.to(dtype)) for batch in (_minibatch(episodes), episodes.validation)
    )
    controller, observation = Uniform(), episodes.observe()
    streams = controller.start(range(NETWORKS))
    # Gates are told that all is well, so that what is legal, and so each action, does not hang on rounding.
    shape = population.table.stage.shape
    sound = np.ones(shape, np.bool_)
    evidence = Evidence(sound, sound, np.zeros(shape, np.float32), np.zeros(shape, np.int16))
    began = 0.0
    for decision in range(DECISIONS):
        if decision == WARM_UP:
            began = _now(plan.device)
        population.evidence = evidence
        masks = legal_actions(population.table, evidence, plan.rules, population.specs.compatible)
        actions, streams = controller.act(observation, masks, streams)
        population.decide(actions)
        train(population, [minibatch] * episodes.suite.batches_per_step)
        evaluate(population, validation)
    return population, _now(plan.device) - began


def _minibatch(episodes: Episodes) -> Batch:
    """The first examples of every network's training data."""
    suite, count = episodes.suite, episodes.suite.batch_size
    data = [suite.data(instance, "train") for instance in episodes.instances]
    return stack_data([Data(one.inputs[:count], one.labels[:count]) for one in data], episodes.device)


def _now(device: torch.device) -> float:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


VALIDATION_TENSORS = 4
"""As large as the largest one, that validation holds at a time: torch's profiler saw 3.2 to 4.2 times as much at most,
over all suites."""
_SAMPLED = 16
"""Instances of which the one with the most training data is taken."""


@dataclass(frozen=True)
class Memory:
    """Bytes by what they are for."""

    data: int
    """Training and validation data, and the order of the former."""
    values: int
    gradients: int
    optimizer: int
    """Its moments, and which row each value belongs to."""
    snapshot: int
    """The governor's."""
    activations: int
    """That the forward pass of a minibatch keeps for the backward pass."""
    validation: int
    """While all counterfactuals are measured, about."""

    @property
    def total(self) -> int:
        """At a time: training and validation take turns."""
        lasting = self.data + self.values + self.optimizer + self.snapshot
        return lasting + max(self.gradients + self.activations, self.validation)


@dataclass(frozen=True)
class SuiteMemory:
    """What a network of a suite takes, and how many fit into each device."""

    suite: str
    network: Memory
    """Grown as far as it can: with the largest seed in every slot."""
    networks: dict[str, int]
    """By device; without those whose memory is unknown."""


def suite_memory(name: str, devices: Sequence[Device]) -> SuiteMemory:
    """Measured on the CPU."""
    network = network_memory(get_suite(name))
    fit = {device.name: device.memory // network.total for device in devices if device.memory is not None}
    return SuiteMemory(name, network, fit)


def network_memory(suite: Suite) -> Memory:
    """What each further network takes."""
    two, one = astuple(population_memory(suite, 2)), astuple(population_memory(suite, 1))
    return Memory(*(both - alone for both, alone in zip(two, one, strict=True)))


def population_memory(suite: Suite, networks: int) -> Memory:
    """What a population of grown networks takes."""
    instance = max(suite.sample(_SAMPLED, "train", np.random.default_rng(_SEED)), key=lambda one: one.train_size)
    fossils = _largest_seeds(Episodes(suite, [instance], Rules()).population)
    episodes = Episodes(suite, [instance] * networks, Rules(), fossils=[fossils] * networks)
    population, pool, data = episodes.population, episodes.population.flat, suite.data(instance, "train")
    order = suite.steps * suite.batches_per_step * suite.batch_size * torch.int64.itemsize
    values = pool.values.nbytes
    # With gradients, whose needs tell how large the tensors of validation are, though it keeps none of them.
    training = _saved_tensors(lambda: train(population, [_minibatch(episodes)]))
    population.execution.train(False)
    variants, inputs = toggle_slots(population, range(population.table.slots)), episodes.validation.inputs
    validation = _saved_tensors(
        lambda: forward_variants(population, variants, inputs, shared=population.shares_prefixes)
    )
    return Memory(
        data=networks * (_bytes(data.inputs, data.labels) + order) + _bytes(*episodes.validation),
        values=values,
        gradients=values,
        optimizer=_bytes(*pool.moments.values(), pool.row_of_value),
        snapshot=values,
        activations=sum(size for place, size in training.items() if place != _address(pool.values)),
        validation=VALIDATION_TENSORS * max(validation.values()),
    )


def _largest_seeds(population: Population) -> Fossils:
    """The compatible blueprint with the most parameters in each slot."""
    roster = population.specs
    (parameters,) = roster.costs.parameters.blueprints * roster.compatible
    return tuple(SeedKind(slot, int(of_slot.argmax())) for slot, of_slot in enumerate(parameters))


def _saved_tensors(forward: Callable[[], object]) -> dict[int, int]:
    """Bytes by address that the graph keeps for the backward pass: many tensors may share one piece of memory."""
    sizes: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        sizes[_address(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        forward()
    return sizes


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _bytes(*tensors: Tensor) -> int:
    return sum(tensor.nbytes for tensor in tensors)


@dataclass(frozen=True)
class RunsFolder:
    """Where runs go. It may not exist yet; then its nearest parent is examined."""

    path: str
    obstacle: str | None
    """Why nothing can be written there."""
    free: int
    """Bytes."""
    file_system: str | None
    """Its type; None where the system does not tell."""
    wal_safe: bool | None
    """Whether SQLite's write-ahead log can be relied on there."""

    @property
    def problems(self) -> Iterator[str]:
        """What is wrong with it."""
        if self.obstacle is not None:
            yield f"no run can be written to {self.path} ({self.obstacle}): choose another folder with --run-dir"
        if self.wal_safe is False:
            yield (
                f"{self.path} lies on {self.file_system}, where SQLite may lose what a run records: "
                "choose a folder on a local disk with --run-dir"
            )


def examine_folder(path: Path) -> RunsFolder:
    """Try it out, leaving no trace."""
    folder, obstacle = path.absolute(), None
    nearest = next(place for place in (folder, *folder.parents) if place.exists())
    try:
        with tempfile.TemporaryFile(dir=nearest) as file:
            file.write(b"x")
    except OSError as error:
        obstacle = error.strerror or str(error)
    kind = file_system_of(nearest)
    return RunsFolder(str(folder), obstacle, shutil.disk_usage(nearest).free, kind, wal_safe(kind))
