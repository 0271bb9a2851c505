"""Policies that come with Esper: weights and settings as a run of `esper train` keeps them, and a card each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from esper.errors import ConfigError, did_you_mean
from esper.runs.run_directory import RunDirectory

ESPER = "esper"
"""The policy that `esper/CARD.md` beside this file describes."""


def open_policy(name: str, others: Sequence[str] = ()) -> RunDirectory:
    """Where the policy of a name is kept: one that is shipped, or that of a run by its directory.

    ``others`` may be chosen as well where the name comes from.

    Raises:
        ConfigError: there is none.
        RunError: that is no run of `esper train`.
    """
    if name == ESPER:
        return RunDirectory(Path(__file__).parent / ESPER)
    names = tuple(dict.fromkeys((*others, ESPER)))
    if not Path(name).exists():
        raise ConfigError(
            f"no controller {name!r}{did_you_mean(name, names)}: give one of {', '.join(names)}, "
            "or the directory of a run of `esper train`"
        )
    return RunDirectory.open_training_run(Path(name))
