"""`esper doctor`."""

from __future__ import annotations

import platform
from dataclasses import asdict
from typing import Any

from esper import __version__
from esper.commands.train import RUNS
from esper.experiments.doctor.checkup import Diagnosis, examine
from esper.ui.doctor import show_diagnosis
from esper.ui.output import console_beside, print_json, say

EXIT_PROBLEMS = 1


def command(json: bool = False) -> int:
    """Examine this installation and this machine, with a self test of a few seconds; code 1 if something is wrong.

    Args:
        json: Print a machine-readable last line.
    """
    console = console_beside(json)
    say(console, "training the same networks stacked and looped ...\n")
    found = examine(RUNS)
    show_diagnosis(console, found)
    if json:
        print_json(_record(found))
    return EXIT_PROBLEMS if found.problems else 0


def _record(found: Diagnosis) -> dict[str, Any]:
    core = () if found.packages is None else found.packages.core
    extras = () if found.packages is None else found.packages.extras
    return {
        "machine": asdict(found.machine),
        "versions": {
            "esper": __version__,
            "python": platform.python_version(),
            **{one.name: one.installed for one in core},
        },
        "devices": [asdict(one) for one in found.devices],
        "extras": {one.name: asdict(one) for one in extras},
        "self_test": [asdict(one) for one in found.self_test],
        "data": [asdict(one) for one in found.data],
        "memory": [{**asdict(one), "total": one.network.total} for one in found.memory],
        "runs": {**asdict(found.runs), "writable": found.runs.writable},
        "problems": found.problems,
    }
