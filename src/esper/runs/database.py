"""The SQLite file of a run: its schema, safe ways to open it, and limits on the cost of reading it.

A damaged file must neither hang nor fill the memory.
"""

import os
import re
import sqlite3
import time
from collections.abc import Generator
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path
from threading import Timer

from esper.errors import RunError
from esper.files import replace_file
from esper.runs.views import VIEWS, build_view_statements

APPLICATION_ID = 0x45535052  # "ESPR"
SCHEMA_VERSION = 1
BUSY_SECONDS = 30.0
READING_SECONDS = 60.0
"""Time limit of a query; the slowest query of a report takes 2 seconds on a run of 160 MB."""
LARGEST_VALUE = 2**24
"""Largest size of a text or blob, in bytes."""
_STEPS = 1000
"""SQLite instructions, a few microseconds, between checks of the clock and for Ctrl-C."""
MOUNTS = Path("/proc/self/mountinfo")

_SHARED_FILE_SYSTEMS = ("9p", "afs", "cifs", "nfs", "nfs4", "smb3", "smbfs", "virtiofs")

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
{build_view_statements("VIEW")}
PRAGMA user_version = {SCHEMA_VERSION};
PRAGMA application_id = {APPLICATION_ID};
"""

_ADVICE = {
    sqlite3.SQLITE_ERROR: f"select from the views {', '.join(VIEWS)}, or from the tables events, scalars and metadata",
    sqlite3.SQLITE_BUSY: "close the program that has locked it, then resume the run",
    sqlite3.SQLITE_FULL: "free some space, then resume the run",
    sqlite3.SQLITE_READONLY: "make it and its folder writable, or work on a copy",
}
"""Advice for error messages, by SQLite's primary result code."""


def create_database(path: Path) -> sqlite3.Connection:
    """Create an empty run store at `path`, completely or not at all."""
    if path.exists() and path.stat().st_size:
        raise RunError(f"{path} exists already: choose a new run directory, or resume that run")
    with replace_file(path) as temporary, translate_errors(path):
        # A killed process may have left a journal, which SQLite would apply to the new file.
        for leftover in path.parent.glob(f"{temporary.name}*"):
            leftover.unlink()
        with closing(sqlite3.connect(temporary, isolation_level=None)) as connection:
            connection.executescript(f"BEGIN; {_SCHEMA} COMMIT;")
    return open_for_writing(path)


def open_for_writing(path: Path) -> sqlite3.Connection:
    """Open an existing run store for appending; raises RunError if it is missing, damaged or not a run store."""
    connection = _connect(path, "mode=rw")
    with translate_errors(path):
        # Without the write-ahead log, readers and the writer wait for each other.
        connection.execute(f"PRAGMA journal_mode = {'DELETE' if lacks_shared_memory(path) else 'WAL'}")
        # Flushed data must survive even a power cut; commits are rare, so this costs little.
        connection.execute("PRAGMA synchronous = FULL")
    return connection


def open_for_reading(path: Path) -> sqlite3.Connection:
    """Open a run store read-only, with this version's views; another process may be writing to it."""
    # WAL's shared memory cannot be created in a read-only folder; a finished store does not need it.
    finished = not path.with_name(f"{path.name}-wal").exists()
    frozen = finished and not os.access(path.parent, os.W_OK)
    connection = _connect(path, "immutable=1" if frozen else "mode=ro")
    with _close_at_errors(connection), translate_errors(path), limit_reading(connection, path):
        connection.executescript(build_view_statements("TEMP VIEW"))
        connection.execute("PRAGMA query_only = TRUE")
    return connection


@contextmanager
def limit_reading(connection: sqlite3.Connection, path: Path) -> Generator[None]:
    """Stop queries that take longer than `READING_SECONDS`."""
    seconds = READING_SECONDS
    end = time.monotonic() + seconds
    connection.set_progress_handler(lambda: time.monotonic() > end, _STEPS)
    # Counting the rows of a table is a single instruction, which only another thread can interrupt.
    alarm = Timer(seconds, connection.interrupt)
    alarm.daemon = True
    alarm.start()
    try:
        yield
    except sqlite3.OperationalError as error:
        if result_code(error) != sqlite3.SQLITE_INTERRUPT:
            raise
        if time.monotonic() < end:
            raise KeyboardInterrupt from error
        raise RunError(
            f"reading the run store {path} was stopped after {seconds:g} seconds: read less of it; if every read "
            "fails, the store is damaged"
        ) from error
    finally:
        alarm.cancel()
        alarm.join()
        connection.set_progress_handler(None, 0)


def result_code(error: sqlite3.Error) -> int | None:
    """SQLite's primary result code; None for an error of Python's, for instance for text that is not UTF-8."""
    code: int | None = getattr(error, "sqlite_errorcode", None)
    return None if code is None else code & 0xFF


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
        # `RunStore` shares its connection between threads, under a lock.
        connection = sqlite3.connect(uri, uri=True, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        with _close_at_errors(connection), limit_reading(connection, path):
            # A manipulated schema must not call unsafe functions, and a damaged value must not fill the memory.
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LARGEST_VALUE)
            connection.execute("PRAGMA trusted_schema = FALSE")
            _check_schema(connection, path)
    return connection


@contextmanager
def _close_at_errors(connection: sqlite3.Connection) -> Generator[None]:
    """Context manager that closes the connection if an error is raised inside."""
    try:
        yield
    except BaseException:
        connection.close()
        raise


def _check_schema(connection: sqlite3.Connection, path: Path) -> None:
    """Require a run store whose tables and indexes are as Esper creates them."""
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if application != APPLICATION_ID:
        raise RunError(f"{path} is not an Esper run store: give the directory of a run")
    if version != SCHEMA_VERSION:
        raise RunError(f"{path} has format {version}, this Esper reads {SCHEMA_VERSION}: use the Esper that wrote it")
    # A view with the name of a table could run forever, and a trigger could change what is written. Other views are
    # harmless: readers create their own temporary views, which take precedence.
    objects = _read_schema(connection)
    for kind, name, *_ in sorted(_expected_schema() - objects):
        raise RunError(f"the run store {path} is damaged or was changed: it has no {kind} `{name}` as Esper makes it")
    for kind, name, *_ in objects:
        if kind == "trigger":
            raise RunError(f"the run store {path} was changed, it has a trigger `{name}`: remove it if you trust it")


def _read_schema(connection: sqlite3.Connection) -> set[tuple[str, str, str, str]]:
    return set(connection.execute("SELECT type, name, tbl_name, sql FROM sqlite_schema WHERE type != 'view'"))


@cache
def _expected_schema() -> set[tuple[str, str, str, str]]:
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(_TABLES)
        return _read_schema(connection)


def lacks_shared_memory(path: Path) -> bool:
    """Whether SQLite's write-ahead log fails on the file system of ``path``, as far as is known."""
    try:
        mounts = MOUNTS.read_text()
    except OSError:  # not Linux
        return False
    types: dict[Path, str] = {}
    for line in mounts.splitlines():
        place, _, source = line.partition(" - ")
        folder = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), place.split()[4])
        types[Path(folder)] = source.split()[0]  # the last mount on a folder covers earlier ones
    place = path.resolve()
    kind = next((types[folder] for folder in (place, *place.parents) if folder in types), "")
    return kind in _SHARED_FILE_SYSTEMS or kind.startswith("fuse")
