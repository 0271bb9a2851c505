"""Controllers of users' files, which are named as ``FILE.py:NAME``."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection
from hashlib import sha256
from pathlib import Path
from typing import Any

from esper.control.controller import Controller
from esper.errors import ConfigError, did_you_mean
from esper.tasks.suite_files import allow_file, import_file, split_name

_NAME = re.compile(r"\w[\w.+-]*")
"""Names of controllers: results are kept in files that are called after them."""


def is_in_file(name: str) -> bool:
    """Whether a controller's name is ``FILE.py:NAME``."""
    return split_name(name)[0] is not None


def hash_file(address: str) -> str:
    """The hash of the file that a controller is in, by which results of an earlier version of it are told apart."""
    return sha256(Path(str(split_name(address)[0])).read_bytes()).hexdigest()


def load_function(address: str, what: str) -> Callable[..., Any]:
    """The class or function at ``FILE.py:NAME``, which makes or is ``what`` in messages.

    The file is run as Python, in this process and in those that get objects of it, as whoever calls this has named it.
    """
    file, name = split_name(address)
    if file is None or os.pathsep in file or not Path(file).is_file():
        raise ConfigError(f"{what} {address}: there is no such file as {file or address}: give FILE.py:NAME")
    allow_file(file)
    # A user's file may raise anything.
    try:
        defined = vars(import_file(file))
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{what} {address}: {file} cannot be run: {type(error).__name__}: {error}") from error
    found: Any = defined.get(name)
    if not callable(found):
        hint = did_you_mean(name, defined) or ": name one that it has"
        raise ConfigError(f"{what} {address}: {file} defines no class or function {name!r}{hint}")
    return found


def load_controller(address: str, horizon: int, taken: Collection[str] = ()) -> Controller:
    """The controller that the class or function at ``FILE.py:NAME`` makes for episodes of so many decisions.

    ``taken`` are names of other controllers, which this one cannot have.
    """
    create = load_function(address, "controller")
    try:
        controller: object = create(horizon)
    except (Exception, SystemExit) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"controller {address} cannot be made ({reason}): NAME is a class or a function, and is called with the "
            "number of decisions of an episode"
        ) from error
    if not isinstance(controller, Controller):
        raise ConfigError(
            f"controller {address} makes {type(controller).__name__}, which is no controller: give it a name and the "
            "methods start and act, as docs/how-to/own-controller.md shows"
        )
    if not _NAME.fullmatch(str(controller.name)) or controller.name in taken:
        others = f" that is not in use ({', '.join(taken)})" if taken else ""
        raise ConfigError(
            f"controller {address} is called {controller.name!r} in results: make its attribute `name` one of letters "
            f"and digits{others}"
        )
    return controller
