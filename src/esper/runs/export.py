"""Writing all events of a run to one file that other programs read."""

import csv
import importlib
import io
import json
import os
from collections.abc import Callable, Iterable
from enum import StrEnum
from pathlib import Path
from typing import Any, BinaryIO

from esper.errors import RunError
from esper.extras import require
from esper.files import replace_file
from esper.runs.events import fields
from esper.runs.reader import EventRecord, RunReader

Chunks = Iterable[list[EventRecord]]


class EventFormat(StrEnum):
    """What events can be exported as."""

    JSONL = "jsonl"
    """A JSON object per line, the payload an object in it."""
    CSV = "csv"
    """A line per event below a line of names, the payload as JSON in one column."""
    PARQUET = "parquet"
    """A row per event, the payload as JSON in one column; needs the extra ``parquet``."""


def export_events(reader: RunReader, to: EventFormat, out: Path) -> int:
    """Write the events that there are now to `out`, whole or not at all, and return how many there are.

    Few of them are in memory at a time, and a run that goes on meanwhile is not held up.

    Raises:
        RunError: the store is damaged, `out` cannot be written or is the store, or pyarrow is missing.
    """
    if out.exists() and out.samefile(reader.path):
        raise RunError(f"{out} is the run store itself: choose another file")
    if to is EventFormat.PARQUET:
        require("parquet", "export to Parquet", "pyarrow", error=RunError)
    count = 0

    def count_events() -> Chunks:
        nonlocal count
        for chunk in reader.all_records():
            count += len(chunk)
            yield chunk

    with replace_file(out) as temporary, temporary.open("wb") as file:
        with reader.name_store_in_errors():
            _WRITERS[to](count_events(), file)
        file.flush()
        os.fsync(file.fileno())
    return count


def _write_jsonl(chunks: Chunks, file: BinaryIO) -> None:
    for chunk in chunks:
        file.writelines(f"{json.dumps(_nest_payload(record))}\n".encode() for record in chunk)


def _nest_payload(record: EventRecord) -> dict[str, Any]:
    try:
        return {**record._asdict(), "payload": fields(record.type, record.payload)}
    except RunError as error:
        raise RunError(f"{error}, in event {record.id}: export it as csv") from error


def _write_csv(chunks: Chunks, file: BinaryIO) -> None:
    text = io.TextIOWrapper(file, encoding="utf-8", newline="", write_through=True)
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(EventRecord._fields)
    for chunk in chunks:
        writer.writerows(chunk)
    text.detach()


def _write_parquet(chunks: Chunks, file: BinaryIO) -> None:
    arrow: Any = importlib.import_module("pyarrow")
    parquet: Any = importlib.import_module("pyarrow.parquet")
    columns = (arrow.int64(), arrow.float64(), arrow.string(), arrow.int64(), arrow.int64(), arrow.string())
    schema = arrow.schema(list(zip(EventRecord._fields, columns, strict=True)))
    with parquet.ParquetWriter(file, schema, compression="zstd") as writer:
        for chunk in chunks:
            rows = [record._asdict() for record in chunk]
            writer.write_table(arrow.Table.from_pylist(rows, schema))


_WRITERS: dict[EventFormat, Callable[[Chunks, BinaryIO], None]] = {
    EventFormat.JSONL: _write_jsonl,
    EventFormat.CSV: _write_csv,
    EventFormat.PARQUET: _write_parquet,
}
