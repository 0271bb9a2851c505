"""Users' files with suites and controllers: which of them may be run in this process, and how they are imported.

A file is run only if the user names it, as ``FILE.py:NAME`` on a command line or in a call, or in the environment
variable `ESPER_SUITES`; a configuration from elsewhere never causes that. This module has no heavy imports, because the
command line needs it before torch.
"""

import importlib
import os
import sys
from collections.abc import Sequence
from hashlib import sha256
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from itertools import pairwise
from pathlib import Path
from types import ModuleType

FILES = "ESPER_SUITES"
"""Environment variable with the files that may be run, separated as in PATH. Child processes inherit it."""
_ENDING = ".py"
_SUITE, _MIX = "suite=", "mix="
_OPTIONS = ("--suite", "--controller")
_MODULE = "esper_file"


def split_name(name: str) -> tuple[str | None, str]:
    """Split ``FILE.py:NAME`` into the file and the name; the file is None for a plain name."""
    path, _, name_inside = name.rpartition(":")
    return (_resolve_path(path), name_inside) if path.endswith(_ENDING) else (None, name)


def allow_files(arguments: Sequence[str]) -> None:
    """Allow the files that a command's arguments name, as ``FILE.py:NAME``, for a suite or controller.

    These are the values of ``--suite``, ``--controller``, ``suite=`` and ``mix=[...]``, and the argument of ``bench
    suite``. Other arguments, such as the name of a folder, never allow a file.
    """
    for before, argument in pairwise(["", *arguments]):
        assigned = argument.removeprefix("--set=").removeprefix("--").removeprefix("controller=")
        positional = before == "suite" and arguments[0] == "bench"
        if assigned.startswith(_MIX):
            names = assigned.removeprefix(_MIX).strip("[] ").split(",")
        elif before in _OPTIONS or positional or argument.startswith("--controller=") or assigned.startswith(_SUITE):
            names = [assigned.removeprefix(_SUITE)]
        else:
            continue
        for name in names:
            path, _ = split_name(name.strip("\"' "))
            if path is not None:
                allow_file(path)


def allow_file(path: str) -> None:
    """Allow a file, by its absolute path, in this process and in processes that it starts later."""
    if path not in list_allowed_files():
        os.environ[FILES] = os.pathsep.join([*list_allowed_files(), path])


def list_allowed_files() -> list[str]:
    """Absolute paths of the files that may be run."""
    return [_resolve_path(path) for path in os.environ.get(FILES, "").split(os.pathsep) if path]


def import_file(path: str) -> ModuleType:
    """Import an allowed file as a module, once per process.

    The module's name depends only on the path, so a process that unpickles its objects imports the file by this name.
    """
    return importlib.import_module(_name_module(path))


def _name_module(path: str) -> str:
    return f"{_MODULE}_{sha256(path.encode()).hexdigest()[:12]}_{Path(path).stem}"


class _AllowedFiles(MetaPathFinder):
    """Import hook that finds allowed files by module name; each file's folder is on the path, as for a script."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """The spec of the module with that name; None if it belongs to no allowed file."""
        if not fullname.startswith(_MODULE):
            return None
        for file in list_allowed_files():
            if _name_module(file) == fullname:
                if (folder := str(Path(file).parent)) not in sys.path:
                    sys.path.append(folder)
                return spec_from_file_location(fullname, file)
        return None


sys.meta_path.append(_AllowedFiles())


def _resolve_path(path: str) -> str:
    return str(Path(path).expanduser().resolve())
