"""A notebook as a page: its text, its code, and what it printed and drew when it last ran."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import groupby
from typing import Any

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def to_markdown(notebook: str) -> str:
    """Markdown of a notebook in JSON, format 4."""
    return "\n".join(part for cell in json.loads(notebook)["cells"] for part in _write_cell(cell))


def _write_cell(cell: dict[str, Any]) -> Iterator[str]:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        yield f"{source}\n"
        return
    yield f"```python\n{source}\n```\n"
    for pictured, outputs in groupby(cell["outputs"], lambda output: "image/png" in output.get("data", {})):
        if pictured:
            yield from (
                f"![](data:image/png;base64,{''.join(''.join(one['data']['image/png']).split())})\n" for one in outputs
            )
        else:
            text = "".join(map(_read_text, outputs)).rstrip()
            yield f"```text\n{text}\n```\n"


def _read_text(output: dict[str, Any]) -> str:
    return _COLOURS.sub("", "".join(output.get("text") or output.get("data", {}).get("text/plain", "")))
