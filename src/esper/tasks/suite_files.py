"""Users' files that register suites: which of them may be run in this process.

A file is Python code. It is run if the user names it: in ``FILE.py:NAME`` on a command line, or as an environment's
argument ``suite``, or in the environment variable `ESPER_SUITES`; never because a configuration from elsewhere names
it. This file imports nothing heavy, as the command line needs it before torch is imported.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

FILES = "ESPER_SUITES"
"""Environment variable: files that register suites, separated as in PATH. Child processes inherit it."""
_ENDING = ".py"
_SUITE, _MIX = "suite=", "mix="


def split_name(name: str) -> tuple[str | None, str]:
    """The file of ``FILE.py:NAME``, None without one, and the name of the suite."""
    path, _, suite_name = name.rpartition(":")
    return (_resolve_path(path), suite_name) if path.endswith(_ENDING) else (None, name)


def allow_files(arguments: Sequence[str]) -> None:
    """Allow the files that a command's arguments name as its suite, in ``FILE.py:NAME``.

    That is after ``--suite`` and in ``bench suite FILE.py:NAME``, or in ``suite=FILE.py:NAME`` and ``mix=[...]``; other
    arguments, such as the name of a folder, never allow a file.
    """
    for before, argument in pairwise(["", *arguments]):
        # The suite may be an option's value, an assignment, or the argument of `bench suite`.
        assigned = argument.removeprefix("--set=").removeprefix("--")
        positional = before == "suite" and arguments[0] == "bench"
        if assigned.startswith(_MIX):
            names = assigned.removeprefix(_MIX).strip("[] ").split(",")
        elif before == "--suite" or positional or assigned.startswith(_SUITE):
            names = [assigned.removeprefix(_SUITE)]
        else:
            continue
        for name in names:
            allow_file(name.strip("\"' "))


def allow_file(name: str) -> None:
    """Allow the file of ``FILE.py:NAME``, a suite that the user names; of other names nothing happens."""
    path, _ = split_name(name)
    if path is not None and path not in list_allowed_files():
        os.environ[FILES] = os.pathsep.join([*list_allowed_files(), path])


def list_allowed_files() -> list[str]:
    """Absolute paths of the files that may be run."""
    return [_resolve_path(path) for path in os.environ.get(FILES, "").split(os.pathsep) if path]


def _resolve_path(path: str) -> str:
    return str(Path(path).expanduser().resolve())
