"""Read what an evaluation left in its run directory."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from esper.errors import RunError

T = TypeVar("T")


def read_json(path: Path, kind: TypeAdapter[T]) -> T:
    """The contents of a JSON file as values of ``kind``.

    Raises:
        RunError: the file is missing, or holds something else.
    """
    advice = f"`esper evaluate {path.parent}`"
    try:
        return kind.validate_json(path.read_bytes())
    except OSError as error:
        raise RunError(f"cannot read {path} ({error.strerror}): make it with {advice}") from error
    except ValidationError as error:
        raise RunError(f"{path} is damaged ({error.errors()[0]['msg']}): make it anew with {advice}") from error
