"""`esper doctor`."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rich.table import Table

from esper import __version__
from esper.commands.options import RUNS
from esper.dash.output import console_beside, print_json, say
from esper.lab.doctor import Diagnosis, SuiteMemory, examine

EXIT_PROBLEMS = 1
_KNOWN = {True: "yes", False: "no", None: "unknown"}
Rows = list[tuple[str, ...]]


def command(json: bool = False) -> int:
    """Examine this installation and this machine, with a self test of a few seconds; code 1 if something is wrong.

    `python -m torch.utils.collect_env` tells more of the machine.

    Args:
        json: Print a machine-readable last line.
    """
    console = console_beside(json)
    say(console, "training the same networks stacked and looped ...\n")
    found = examine(RUNS)
    for title, rows in _sections(found).items():
        console.print(_table(title, rows))
        console.print()
    for problem in found.problems or ["all is well"]:
        say(console, f"problem: {problem}" if found.problems else problem)
    if json:
        print_json(_record(found))
    return EXIT_PROBLEMS if found.problems else 0


def _record(found: Diagnosis) -> dict[str, Any]:
    return {
        "machine": {"system": platform.platform(), "python": sys.executable},
        "versions": {
            "esper": __version__,
            "python": platform.python_version(),
            **{one.name: one.installed for one in found.packages},
        },
        "devices": [asdict(one) for one in found.devices],
        "extras": {one.name: asdict(one) for one in found.extras},
        "self_test": [asdict(one) for one in found.self_test],
        "data": {name: source.words for name, source in found.data.items()},
        "memory": [{**asdict(one), "total": one.network.total} for one in found.memory],
        "runs": asdict(found.runs),
        "problems": found.problems,
    }


def _sections(found: Diagnosis) -> Mapping[str, Rows]:
    runs, lacking = found.runs, [one for one in found.extras if one.lacking]
    return {
        "machine": [("system", platform.platform()), ("python", f"{platform.python_version()} at {sys.executable}")],
        "versions": [
            (one.name, one.installed or "missing", "" if one.fits else f"needs {one.required}")
            for one in found.packages
        ],
        "devices": [(one.name, one.model, _size(one.memory)) for one in found.devices],
        "stacked against looped": [
            (
                one.device,
                "agree" if one.agrees else "DISAGREE",
                "not finite" if one.difference is None else f"largest difference {one.difference:.0e}",
                f"{one.stacked_seconds:.2f} s and {one.looped_seconds:.2f} s: {one.faster} is faster",
            )
            for one in found.self_test
        ],
        "data": [(name, source.words, str(source.path or "")) for name, source in found.data.items()],
        "KiB of a network with the largest seed in every slot, and how many networks fit": _memory(found.memory),
        "runs": [
            ("folder", runs.path),
            ("writable", "yes" if runs.obstacle is None else f"no: {runs.obstacle}"),
            ("free", _size(runs.free)),
            ("file system", f"{runs.file_system or 'unknown'}, safe for SQLite's log: {_KNOWN[runs.wal_safe]}"),
        ],
        "extras": [
            *((one.name, f"lacks {', '.join(one.lacking)}" if one.lacking else "complete") for one in found.extras),
            *(("", f"for instance: {one.install}") for one in lacking[:1]),
        ],
    }


def _memory(suites: tuple[SuiteMemory, ...]) -> Rows:
    """A column per suite."""
    columns = [
        {
            "": one.suite,
            **{part: f"{size / 2**10:,.0f}" for part, size in asdict(one.network).items()},
            "at a time": f"{one.network.total / 2**10:,.0f}",
            **{f"fit into {device}": f"{count:,}" for device, count in one.networks.items()},
        }
        for one in suites
    ]
    return [(part, *(column[part] for column in columns)) for part in (columns[0] if columns else ())]


def _table(title: str, rows: Rows) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, show_header=False)
    for _ in max(rows, key=len, default=()):
        table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*(cell.replace("[", r"\[") for cell in row))
    return table


def _size(count: int | None) -> str:
    return "" if count is None else f"{count / 2**30:.1f} GiB"
