"""docs/reference/events.md says what the code says."""

from pathlib import Path

from docs.write_events import document, event_table, view_table
from esper.runs.events import event_types
from esper.runs.views import VIEWS

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "events.md"


def test_the_page_is_what_the_code_generates():
    assert PAGE.read_text() == document(), "write it anew: python docs/write_events.py > docs/reference/events.md"


def test_every_event_has_its_fields_types_defaults_and_meanings():
    table = event_table()
    for name, event_type in event_types().items():
        assert f"### `{name}`, version {event_type.version}" in table
    assert "| `kept` | `tuple[str \\| None, ...]` | Blueprint of the fossil in each slot. |" in table
    assert "| `blueprint` | `str \\| None` | `None` | The germinated blueprint; in a run of" in table
    assert "| `choices` | `dict[str, str]` | `{}` |" in table


def test_every_view_has_its_columns():
    lines = view_table().splitlines()
    assert len(lines) == 2 + len(VIEWS)
    assert any(line.startswith("| `rewards` | one term of the reward") and "`term`, `value`" in line for line in lines)
