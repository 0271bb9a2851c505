"""Files of yours that register suites: which of them may be run in this process.

A file is Python code. It is run where you name it: in ``FILE.py:NAME`` on a command line, or in the environment
variable `ESPER_SUITES`; never because a configuration that came from elsewhere names it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

FILES = "ESPER_SUITES"
"""Environment variable: files that register suites, separated as in PATH. Processes that this one starts see it."""
_ENDING = ".py"
_SUITE, _MIX = "suite=", "mix="


def split_name(name: str) -> tuple[str | None, str]:
    """The file of ``FILE.py:NAME``, None where there is none, and the suite's own name."""
    path, _, own = name.rpartition(":")
    return (_resolve(path), own) if path.endswith(_ENDING) else (None, name)


def allow_files(words: Sequence[str]) -> None:
    """Let the files be run that a command's words name as its suite, in ``FILE.py:NAME``.

    That is behind ``--suite`` and in ``bench suite FILE.py:NAME``, or in ``suite=FILE.py:NAME`` and ``mix=[...]``;
    whatever else looks alike, such as the name of a folder, is none.
    """
    for before, word in pairwise(["", *words]):
        assigned = word.removeprefix("--set=").removeprefix("--")
        positional = before == "suite" and words[0] == "bench"
        if assigned.startswith(_MIX):
            names = assigned.removeprefix(_MIX).strip("[] ").split(",")
        elif before == "--suite" or positional or assigned.startswith(_SUITE):
            names = [assigned.removeprefix(_SUITE)]
        else:
            continue
        for name in names:
            path, _ = split_name(name.strip("\"' "))
            if path is not None and path not in allowed_files():
                os.environ[FILES] = os.pathsep.join([*allowed_files(), path])


def allowed_files() -> list[str]:
    """Their absolute paths."""
    return [_resolve(path) for path in os.environ.get(FILES, "").split(os.pathsep) if path]


def _resolve(path: str) -> str:
    return str(Path(path).expanduser().resolve())
