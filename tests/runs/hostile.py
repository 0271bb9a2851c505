"""Run stores that somebody has broken on purpose, made from a good one."""

import os
import sqlite3
import struct
from collections.abc import Callable, Generator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from esper.runs.database import LARGEST_VALUE

Attack = Callable[[Path], object]
"""Breaks the store at a path."""

COLUMNS: Mapping[str, Mapping[str, str]] = {
    "metadata": {"key": "TEXT", "value": "TEXT"},
    "events": {
        "id": "INTEGER",
        "time": "REAL",
        "type": "TEXT",
        "version": "INTEGER",
        "iteration": "INTEGER",
        "payload": "TEXT",
    },
    "scalars": {"iteration": "INTEGER", "name": "TEXT", "value": "REAL"},
}
KEYS = ("command", "seed", "suite", "environments", "iterations", "steps", "slots", "blueprints", "operations", "heads")
_VALUES = {
    "a blob": "x'00ff'",
    "bad UTF-8": "CAST(x'41ff42' AS TEXT)",
    "a word": "'x'",
    "minus one": "-1",
    "the largest": f"{2**63 - 1}",
    "infinity": "9e999",
    "NULL": "NULL",
    "huge": f"printf('%.*c', {LARGEST_VALUE + 1}, 'x')",
}
_PAYLOADS = {
    "no JSON": "'once upon a time'",
    "a list": "'[1, 2]'",
    "a number": "'5'",
    "no fields": "'{}'",
    "too deep": "replace(printf('%.*c', 100000, '['), 'x', '')",
    "fields that are lists": "json_object('iteration', iteration, 'episode', json('[]'), 'environment', json('[]'), "
    "'step', json('{}'), 'slot', json('[[1]]'), 'accuracy', 'x', 'objective', json('{}'), 'after', 5, 'stages', 7)",
    "fields that are huge": "json_object('iteration', 9e300, 'episode', 9e300, 'environment', 9e300, 'step', 9e300)",
}
_JSON = {"a number": "5", "a word": '"x"', "a list": "[[1]]", "an object": '{"a": [1]}', "null": "null", "bad": "{"}


def attacks() -> dict[str, Attack]:
    """All of them by name."""
    found: dict[str, Attack] = {
        "not SQLite": lambda path: _write(path, b"once upon a time, " * 1000),
        "empty": lambda path: _write(path, b""),
        "zeros": lambda path: _write(path, bytes(8192)),
        "a header alone": lambda path: os.truncate(path, 100),
        "somebody else's": lambda path: _run(path, "PRAGMA application_id = 7"),
        "of another version": lambda path: _run(path, "PRAGMA user_version = 77"),
        **{f"cut at {part}%": _cut(part) for part in (10, 30, 50, 70, 90)},
    }
    for table in COLUMNS:
        found |= {
            f"{table} an endless view": _replaced(table, _endless(table)),
            f"{table} missing": lambda path, table=table: _run(path, f"DROP TABLE {table}"),
            f"{table} with another column": _replaced(table, f"CREATE TABLE {table} (id, other)"),
            f"{table} virtual": _replaced(table, f"CREATE VIRTUAL TABLE {table} USING fts5(x)"),
            f"{table} with a computed column": _computed(table),
            f"{table} with a trigger": _triggered(table),
            f"{table} a tree without end": lambda path, table=table: plant_endless_tree(path, table),
        }
    for table, columns in COLUMNS.items():
        for column in columns:
            for what, value in _VALUES.items():
                if (column, what) not in {("id", "a word"), ("id", "a blob"), ("id", "bad UTF-8"), ("id", "infinity")}:
                    found[f"{table}.{column} {what}"] = _set(table, column, value)
    for what, payload in _PAYLOADS.items():
        found[f"payloads: {what}"] = lambda path, payload=payload: _run(path, f"UPDATE events SET payload = {payload}")
    for key in (*KEYS, "features", "baseline_levels"):
        for what, text in _JSON.items():
            found[f"metadata {key}: {what}"] = lambda path, key=key, text=text: _run(
                path, f"UPDATE metadata SET value = '{text}' WHERE key = '{key}'"
            )
    return found


def plant_endless_tree(path: Path, name: str) -> None:
    """Put pages under a table's root that all point to the same child, level upon level: 40^12 ways to its rows."""
    with _opened(path) as connection:
        ((root,),) = connection.execute("SELECT rootpage FROM sqlite_schema WHERE name = ?", (name,)).fetchall()
        ((size,),) = connection.execute("PRAGMA page_size").fetchall()
    data = bytearray(path.read_bytes())
    page = _page(data, root, size)
    while page[0] in (2, 5):  # down to a leaf
        page = _page(data, struct.unpack(">I", page[8:12])[0], size)
    cell = _first_cell(page)
    levels, pages = 12, len(data) // size
    for level in range(levels):
        child = pages + level  # the page before, counted from 1
        data += _interior(bytes(page), cell, child, size) if level else page.ljust(size, b"\0")
    data[(root - 1) * size : root * size] = _interior(bytes(page), cell, pages + levels, size)
    data[28:32] = struct.pack(">I", len(data) // size)
    path.write_bytes(data)


def _page(data: bytearray, number: int, size: int) -> bytes:
    assert number > 1, "the first page begins with the file's header"
    return bytes(data[(number - 1) * size : number * size])


def _first_cell(leaf: bytes) -> bytes:
    """A cell of an index's leaf: length and record; of a table's leaf only its key matters."""
    (place,) = struct.unpack(">H", leaf[8:10])
    length = leaf[place] if leaf[place] < 128 else 0
    return leaf[place : place + 1 + length]


def _interior(leaf: bytes, cell: bytes, child: int, size: int) -> bytes:
    """A page of forty cells that all lead to ``child``."""
    is_table = leaf[0] == 13
    one = struct.pack(">I", child) + (b"\x7f" if is_table else cell)
    count, page, place = 40, bytearray(size), size
    page[0] = 5 if is_table else 2
    for index in range(count):
        place -= len(one)
        page[place : place + len(one)] = one
        page[12 + 2 * index : 14 + 2 * index] = struct.pack(">H", place)
    page[3:5], page[5:7] = struct.pack(">H", count), struct.pack(">H", place)
    page[8:12] = struct.pack(">I", child)
    return bytes(page)


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def _cut(percent: int) -> Attack:
    return lambda path: os.truncate(path, path.stat().st_size * percent // 100)


def _endless(table: str) -> str:
    columns = ", ".join(f"n AS {column}" for column in COLUMNS[table])
    numbers = "WITH RECURSIVE numbers(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers)"
    return f"CREATE VIEW {table} AS {numbers} SELECT {columns} FROM numbers WHERE n < 0"


def _replaced(table: str, definition: str) -> Attack:
    return lambda path: _run(path, f"DROP TABLE {table}", definition)


def _computed(table: str) -> Attack:
    *first, last = COLUMNS[table]
    columns = ", ".join([*first, f"{last} AS (zeroblob(900000000))"])
    return _replaced(table, f"CREATE TABLE {table} ({columns})")


def _triggered(table: str) -> Attack:
    return lambda path: _run(path, f"CREATE TRIGGER trap AFTER INSERT ON {table} BEGIN DELETE FROM {table}; END")


def _set(table: str, column: str, value: str) -> Attack:
    """Of one row: primary keys stay apart."""
    first = {"metadata": "key = 'command'", "events": "id = 1", "scalars": "iteration = 1 AND name = 'objective'"}[
        table
    ]

    def attack(path: Path) -> None:
        ((definition,),) = _run(path, f"SELECT sql FROM sqlite_schema WHERE name = '{table}'")
        _redefine(path, table, definition.replace(" NOT NULL", ""))
        with suppress(sqlite3.IntegrityError):  # of a primary key
            _run(path, f"UPDATE {table} SET {column} = {value} WHERE {first}")
        _redefine(path, table, definition)

    return attack


def _redefine(path: Path, table: str, definition: str) -> None:
    with _opened(path) as connection:
        connection.execute("PRAGMA writable_schema = ON")
        connection.execute("UPDATE sqlite_schema SET sql = ? WHERE name = ?", (definition, table))
        connection.commit()


def _run(path: Path, *statements: str) -> list[tuple[str]]:
    rows: list[tuple[str]] = []
    with _opened(path) as connection:
        for statement in statements:
            rows = connection.execute(statement).fetchall()
        connection.commit()
    return rows


@contextmanager
def _opened(path: Path) -> Generator[sqlite3.Connection]:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
        yield connection
