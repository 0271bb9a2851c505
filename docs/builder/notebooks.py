"""A notebook as a page: its text, its code, and what it printed and drew when it last ran."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
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
    for output in cell["outputs"]:
        shown = output.get("data", {})
        if "image/png" in shown:
            yield f"![](data:image/png;base64,{''.join(shown['image/png']).replace(chr(10), '')})\n"
        elif "image/svg+xml" in shown:
            yield f"{''.join(shown['image/svg+xml'])}\n"
        else:
            text = "".join(output.get("text") or shown.get("text/plain", ""))
            yield f"```text\n{_COLOURS.sub('', text).rstrip()}\n```\n"
