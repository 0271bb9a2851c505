"""The SQLite file of a run: its schema, and opening it safely."""

import os
import sqlite3
from collections.abc import Generator
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path

from esper.errors import RunError
from esper.files import replace_file
from esper.runs.file_system import file_system_of, wal_safe
from esper.runs.limits import LARGEST_VALUE, limit_reading, result_code
from esper.runs.views import VIEWS, definitions

APPLICATION_ID = 0x45535052  # "ESPR"
SCHEMA_VERSION = 1
BUSY_SECONDS = 30.0

_TABLES = """
CREATE TABLE metadata (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE events (
    id INTEGER PRIMARY KEY,
    time REAL NOT NULL,
    type TEXT NOT NULL,
    version INTEGER NOT NULL,
    iteration INTEGER NOT NULL,
    payload TEXT NOT NULL
);
CREATE INDEX events_by_type ON events (type, iteration);
-- SQLite stores NaN as NULL.
CREATE TABLE scalars (
    iteration INTEGER NOT NULL,
    name TEXT NOT NULL,
    value REAL,
    PRIMARY KEY (iteration, name)
) WITHOUT ROWID;
CREATE INDEX scalars_by_name ON scalars (name, iteration);
"""
_SCHEMA = f"""
{_TABLES}
{definitions("VIEW")}
PRAGMA user_version = {SCHEMA_VERSION};
PRAGMA application_id = {APPLICATION_ID};
"""

_ADVICE = {
    sqlite3.SQLITE_ERROR: f"select from the views {', '.join(VIEWS)}, or from the tables events, scalars and metadata",
    sqlite3.SQLITE_BUSY: "close the program that has locked it, then resume the run",
    sqlite3.SQLITE_FULL: "free some space, then resume the run",
    sqlite3.SQLITE_READONLY: "make it and its folder writable, or work on a copy",
}
"""What to do about it, by SQLite's primary result code."""


def create_database(path: Path) -> sqlite3.Connection:
    """Make a new, empty run store at `path`, whole or not at all; RunError if something is there already."""
    if path.exists() and path.stat().st_size:
        raise RunError(f"{path} exists already: choose a new run directory, or resume that run")
    with replace_file(path) as temporary, translate_errors(path):
        for leftover in path.parent.glob(f"{temporary.name}*"):
            leftover.unlink()
        with closing(sqlite3.connect(temporary, isolation_level=None)) as connection:
            connection.executescript(f"BEGIN; {_SCHEMA} COMMIT;")
    return open_for_writing(path)


def open_for_writing(path: Path) -> sqlite3.Connection:
    """Open an existing run store for appending; RunError if it is missing, damaged or not ours."""
    connection = _connect(path, "mode=rw")
    with translate_errors(path):
        _prepare_writing(connection, path)
    return connection


def open_for_reading(path: Path) -> sqlite3.Connection:
    """Open an existing run store read-only, with the newest views, also while another process writes to it.

    Raises:
        RunError: the store is missing, damaged or not ours.
    """
    # A finished store in a read-only folder has no room for WAL's shared memory, and needs none.
    finished = not path.with_name(f"{path.name}-wal").exists()
    frozen = finished and not os.access(path.parent, os.W_OK)
    connection = _connect(path, "immutable=1" if frozen else "mode=ro")
    with _close_at_errors(connection), translate_errors(path), limit_reading(connection, path):
        connection.executescript(definitions("TEMP VIEW"))
        connection.execute("PRAGMA query_only = TRUE")
    return connection


@contextmanager
def translate_errors(path: Path) -> Generator[None]:
    """Turn SQLite's errors into RunError."""
    try:
        yield
    except (sqlite3.ProgrammingError, sqlite3.Warning) as error:
        raise RunError(f"cannot query the run store {path} ({error}): give one SELECT statement") from error
    except sqlite3.DatabaseError as error:
        if (code := result_code(error)) is not None and isinstance(error, sqlite3.OperationalError):
            advice = _ADVICE.get(code, "check free space, permissions and locks")
            raise RunError(f"cannot use the run store {path} ({error}): {advice}") from error
        raise RunError(f"the run store {path} is damaged or not a run store ({error})") from error


def _connect(path: Path, options: str) -> sqlite3.Connection:
    if not path.is_file():
        raise RunError(f"no run store at {path}: give the directory of a run")
    with translate_errors(path):
        uri = f"{path.absolute().as_uri()}?{options}"
        # Whoever shares a connection between threads locks it.
        connection = sqlite3.connect(uri, uri=True, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        with _close_at_errors(connection), limit_reading(connection, path):
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LARGEST_VALUE)
            connection.execute("PRAGMA trusted_schema = FALSE")
            _check_ours(connection, path)
            _check_schema(connection, path)
    return connection


@contextmanager
def _close_at_errors(connection: sqlite3.Connection) -> Generator[None]:
    try:
        yield
    except BaseException:
        connection.close()
        raise


def _prepare_writing(connection: sqlite3.Connection, path: Path) -> None:
    # Where the write-ahead log would fail, readers and the writer wait for each other instead.
    safe = wal_safe(file_system_of(path))
    connection.execute(f"PRAGMA journal_mode = {'DELETE' if safe is False else 'WAL'}")
    # What was flushed must survive a power cut too; commits are few, so this costs little.
    connection.execute("PRAGMA synchronous = FULL")


def _check_ours(connection: sqlite3.Connection, path: Path) -> None:
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if application != APPLICATION_ID:
        raise RunError(f"{path} is not an Esper run store: give the directory of a run")
    if version != SCHEMA_VERSION:
        raise RunError(f"{path} has format {version}, this Esper reads {SCHEMA_VERSION}: use the Esper that wrote it")


def _check_schema(connection: sqlite3.Connection, path: Path) -> None:
    """RunError unless our tables and indexes are what they were made as.

    A view of the same name could run without end, a trigger would act on what is written. Views beside the tables do
    no harm: readers bring their own, which go first.
    """
    found = _objects(connection)
    for kind, name, *_ in sorted(_our_objects() - found):
        raise RunError(f"the run store {path} is damaged or was changed: it has no {kind} `{name}` as Esper makes it")
    for kind, name, *_ in found:
        if kind == "trigger":
            raise RunError(f"the run store {path} was changed, it has a trigger `{name}`: remove it if you trust it")


def _objects(connection: sqlite3.Connection) -> set[tuple[str, str, str, str]]:
    return set(connection.execute("SELECT type, name, tbl_name, sql FROM sqlite_schema WHERE type != 'view'"))


@cache
def _our_objects() -> set[tuple[str, str, str, str]]:
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(_TABLES)
        return _objects(connection)
