"""The site's pages link to what is there, its reference leaves nothing out, and faults of a built site are found."""

import json
from importlib.util import find_spec
from pathlib import Path, PurePosixPath

import pytest

import esper
from docs.builder.checks import find_faults
from docs.builder.drawings import tabulate_charts
from docs.builder.notebooks import to_markdown
from docs.builder.pages import place_of, redirect_links, write_pages
from docs.write_events import document

needs_griffe = pytest.mark.skipif(find_spec("griffe") is None, reason="needs the extra docs")


@pytest.mark.parametrize(
    ("file", "place"),
    [
        ("docs/look.md", "look.md"),
        ("docs/how-to/compile.md", "how-to/compile.md"),
        ("docs/notebooks/read_a_run.ipynb", "notebooks/read_a_run.md"),
        ("docs/images/growth.svg", "images/growth.svg"),
        ("README.md", "repository/readme.md"),
        ("examples/own_suite.py", "repository/examples/own_suite.py.md"),
        ("examples", "repository/examples/files.md"),
    ],
)
def test_every_file_has_a_place_in_the_site(file: str, place: str) -> None:
    assert place_of(PurePosixPath(file)) == PurePosixPath(place)


def test_links_lead_to_these_places_and_code_is_left_alone() -> None:
    text = "[a](../README.md#words) [b](look.md) [c](https://e.org/x.md)\n\n```\n[d](../README.md)\n```\n"
    moved, linked = redirect_links(text, PurePosixPath("docs/ui.md"))
    assert moved == text.replace("../README.md#words", "repository/readme.md#words")
    assert linked == [PurePosixPath("README.md"), PurePosixPath("docs/look.md")]
    with pytest.raises(FileNotFoundError, match=r"docs/ui\.md links to nothing\.md"):
        redirect_links("[a](nothing.md)", PurePosixPath("docs/ui.md"))


def test_all_pages_can_be_written(tmp_path: Path) -> None:
    write_pages(tmp_path)
    for page in ("index.md", "start.md", "repository/contributing.md", "notebooks/read_a_run.md", "images/growth.svg"):
        assert (tmp_path / page).stat().st_size > 0


def test_a_notebook_becomes_text_code_and_what_was_shown_and_a_chart_a_table() -> None:
    outputs = [
        {"output_type": "stream", "text": ["\x1b[1mhe", "llo\n"]},
        {"output_type": "display_data", "data": {"image/png": "QQ=="}},
    ]
    code = {"cell_type": "code", "source": ["f()"], "outputs": outputs}
    page = to_markdown(json.dumps({"cells": [{"cell_type": "markdown", "source": ["# A"]}, code]}))
    assert page.split("\n\n") == [
        "# A",
        "```python\nf()\n```",
        "```text\nhello\n```",
        "![](data:image/png;base64,QQ==)\n",
    ]
    chart = '```mermaid\nflowchart LR\n    a["a<br/>2 files"]\n    b["b<br/>3 files"]\n    a --> b\n```'
    rows = tabulate_charts(f"before\n\n{chart}\n\nafter").splitlines()
    assert rows[-4:] == ["| a | 2 files | b |", "| b | 3 files |  |", "", "after"]


SOUND = '<h2 id="esper.attach">attach</h2><a href="other/#there">x</a><a href="https://e.org">y</a>'


def built(site: Path, index: str) -> Path:
    (site / "other").mkdir()
    (site / "index.html").write_text(index)
    (site / "other" / "index.html").write_text('<p id="there">x</p>')
    return site


@pytest.mark.parametrize(
    ("page", "fault"),
    [
        (SOUND.replace("#there", "#nowhere"), "index.html: other/#nowhere leads nowhere"),
        (SOUND.replace("other/", "absent/"), "index.html: absent/#there leads nowhere"),
        (SOUND.replace("h2", "p"), "esper.attach: no heading in the reference"),
        (f'{SOUND}<script src="https://e.org/x.js"></script>', "index.html: fetches https://e.org/x.js"),
        (f'{SOUND}<img src="absent.svg">', "index.html: absent.svg is not there"),
    ],
)
def test_faults_are_found(page: str, fault: str, tmp_path: Path) -> None:
    assert find_faults(built(tmp_path, page), ["esper.attach"]) == [fault]


@pytest.mark.landing
@needs_griffe
def test_the_reference_has_every_public_name_and_all_have_docstrings(monkeypatch: pytest.MonkeyPatch) -> None:
    from docs.builder import reference  # noqa: PLC0415 - imports griffe

    assert reference.find_gaps() == []
    names = set(reference.public_names())
    assert {f"esper.{name}" for name in esper.__all__} <= names
    monkeypatch.setattr(
        reference, "public_names", lambda: [*(names - {"esper.attach"}), "esper.control.controller.Actions"]
    )
    assert reference.find_gaps() == [
        "esper.attach is in no page of docs/reference",
        "esper.control.controller.Actions has no docstring",
    ]


# docs/reference/events.md says what the code says.


PAGE = Path(__file__).parents[2] / "docs" / "reference" / "events.md"


def test_the_page_is_what_the_code_generates():
    assert PAGE.read_text() == document(), "write it anew: python docs/write_events.py > docs/reference/events.md"


# The pages of the gallery are what the stored runs say.


ROOT = Path(__file__).parents[2]
LINES = ROOT / "benchmarks" / "results" / "foreign"


@pytest.mark.landing
def test_the_pages_are_what_the_stored_runs_give() -> None:
    from docs.write_gallery import document  # noqa: PLC0415 - imports all benchmarks of foreign models

    pages = {page.name: page.read_text() for page in (ROOT / "docs" / "gallery").glob("*.md")}
    assert pages == document(), "write them anew: python docs/write_gallery.py"


@pytest.mark.landing
def test_runs_with_decisions_are_those_of_the_table() -> None:
    table = {(one["problem"], one["arm"], one["seed"]): one for one in read("reporting.jsonl")}
    runs = read("gallery.jsonl")
    assert len(runs) == 5 * len({one["problem"] for one in runs})
    for one in runs:
        decisions = one.pop("decisions")
        assert one == table[one["problem"], one["arm"], one["seed"]]
        assert len(decisions) == one["tried"]
        assert sum(line.startswith("kept ") for line in decisions) == one["kept"]


@pytest.mark.landing
def test_what_a_module_is_measured_by_can_be_read() -> None:
    from docs.write_gallery import parse_tried  # noqa: PLC0415
    from esper.growth.summary import TriedModule  # noqa: PLC0415
    from esper.lifecycle.table import SeedRating  # noqa: PLC0415

    rating = SeedRating(-0.5, 0.25, 0.0, 0.0, -0.125, 0.01, 0.01)
    module = TriedModule("rho.1", "mlp", 612, 3, 11, False, "look", rating)
    found = parse_tried(str(module))
    assert (found.slot, found.blueprint, found.kept) == ("rho.1", "mlp", False)
    assert (found.contribution, found.loss) == (-0.5, -12.5)


def read(name: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in (LINES / name).read_text().splitlines()]
