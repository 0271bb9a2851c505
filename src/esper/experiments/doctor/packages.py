"""The packages that Esper needs or can use, by its own installed metadata."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution, version

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from esper.extras import DISTRIBUTION, command_for


@dataclass(frozen=True)
class Package:
    """A package beside the range that Esper declares for it."""

    name: str
    required: str
    """As in ``>=2.9,<2.14``; empty where any will do."""
    installed: str | None
    fits: bool


@dataclass(frozen=True)
class Extra:
    """An optional part of Esper."""

    name: str
    complete: bool
    lacking: tuple[str, ...]
    """Requirements that are not met."""
    install: str
    """The command that completes it."""


@dataclass(frozen=True)
class Packages:
    """All that the metadata names."""

    core: tuple[Package, ...]
    extras: tuple[Extra, ...]


def installed_packages() -> Packages | None:
    """What is there of what Esper declares; None if Esper itself is not installed and so declares nothing."""
    try:
        esper = distribution(DISTRIBUTION)
    except PackageNotFoundError:
        return None
    names = esper.metadata.get_all("Provides-Extra") or []
    core = sorted((_package(one) for one in _requirements(esper, "")), key=lambda one: one.name)
    return Packages(tuple(core), tuple(_extra(esper, name) for name in sorted(names)))


def _requirements(esper: Distribution, extra: str) -> Iterator[Requirement]:
    """Of the core, or those that an extra adds to it; an extra may name others of Esper's extras."""
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
    return Extra(name, not lacking, tuple(lacking), command_for(esper, name))
