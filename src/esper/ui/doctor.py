"""A diagnosis as tables for the terminal."""

from __future__ import annotations

from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from esper.experiments.doctor.checkup import Diagnosis
from esper.experiments.doctor.memory import SuiteMemory
from esper.experiments.doctor.packages import Packages
from esper.experiments.doctor.self_test import SelfTest
from esper.ui.output import say

_KNOWN = {True: "yes", False: "no", None: "unknown"}


def show_diagnosis(console: Console, found: Diagnosis) -> None:
    """All of it, problems last."""
    for title, rows in (
        ("machine", _machine(found)),
        ("versions", _versions(found.packages)),
        ("devices", _devices(found)),
        ("stacked against looped", _self_tests(found.self_test)),
        ("data", [(one.suite, one.source, one.path or "") for one in found.data]),
        ("KiB of a network with the largest seed in every slot, and how many networks fit", _memory(found.memory)),
        ("runs", _runs(found)),
        ("extras", _extras(found.packages)),
    ):
        console.print(_table(title, rows))
        console.print()
    for problem in found.problems:
        say(console, f"problem: {problem}")
    if not found.problems:
        say(console, "all is well")


def _table(title: str, rows: list[tuple[str, ...]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, show_header=False)
    for _ in max(rows, key=len, default=()):
        table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*(cell.replace("[", r"\[") for cell in row))
    return table


def _machine(found: Diagnosis) -> list[tuple[str, ...]]:
    machine = found.machine
    return [
        ("system", machine.system),
        ("python", machine.python),
        ("cores", str(machine.cores)),
        ("memory", f"{_size(machine.memory)}, {_size(machine.available_memory)} available"),
    ]


def _versions(packages: Packages | None) -> list[tuple[str, ...]]:
    core = () if packages is None else packages.core
    return [(one.name, one.installed or "missing", "" if one.fits else f"needs {one.required}") for one in core]


def _devices(found: Diagnosis) -> list[tuple[str, ...]]:
    return [
        (one.name, one.model, one.capability, _size(one.memory), f"bf16: {_KNOWN[one.bf16]}") for one in found.devices
    ]


def _self_tests(tests: tuple[SelfTest, ...]) -> list[tuple[str, ...]]:
    return [
        (
            one.device,
            f"{'agree' if one.agrees else 'DISAGREE'}, {_difference(one)}",
            f"{one.stacked_seconds:.2f} s and {one.looped_seconds:.2f} s: {one.faster} is faster",
        )
        for one in tests
    ]


def _difference(test: SelfTest) -> str:
    return "not finite" if test.difference is None else f"largest difference {test.difference:.0e}"


def _memory(suites: tuple[SuiteMemory, ...]) -> list[tuple[str, ...]]:
    """A column per suite."""
    sizes = [{**asdict(one.network), "at a time": one.network.total} for one in suites]
    return [
        ("", *(one.suite for one in suites)),
        *((part, *(f"{own[part] / 2**10:,.0f}" for own in sizes)) for part in (sizes[0] if sizes else ())),
        *(
            (f"fit into {device}", *(f"{one.networks[device]:,}" for one in suites))
            for device in (suites[0].networks if suites else ())
        ),
    ]


def _runs(found: Diagnosis) -> list[tuple[str, ...]]:
    runs = found.runs
    return [
        ("folder", runs.path),
        ("writable", "yes" if runs.obstacle is None else f"no: {runs.obstacle}"),
        ("free", _size(runs.free)),
        ("file system", f"{runs.file_system or 'unknown'}, safe for SQLite's log: {_KNOWN[runs.wal_safe]}"),
    ]


def _extras(packages: Packages | None) -> list[tuple[str, ...]]:
    extras = () if packages is None else packages.extras
    lacking = [one for one in extras if not one.complete]
    rows = [(one.name, f"lacks {', '.join(one.lacking)}" if one in lacking else "complete") for one in extras]
    return [*rows, ("", f"for instance: {lacking[0].install}")] if lacking else rows


def _size(count: int | None) -> str:
    return "" if count is None else f"{count / 2**30:.1f} GiB"
