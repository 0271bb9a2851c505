"""What the pages name exists: commands, their options, settings, files, and the tests that show something."""

import ast
import io
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import redirect_stdout
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

import esper
from esper.cli import COMMANDS, Command, main
from esper.config.loading import load_settings
from esper.errors import ConfigError
from esper.tasks.suite_files import FILES
from esper.train.settings import TrainSettings
from tools.mutations import CHECK, read_lineage

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
DEFECTS = 40
BY_LENGTH = sorted(COMMANDS, key=lambda command: -len(command.name))
TRAINING = ("train", "compare")
"""Commands whose `--set` is of `TrainSettings`."""

Call = tuple[str, Command | None, list[str]]


def calls(page: Path) -> Iterator[Call]:
    """Lines of code blocks and quoted pieces that call `esper`, the command named and the words after it."""
    text = page.read_text()
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    quoted = [
        piece.replace("\n", " ")
        for piece in re.findall(r"`(esper [^`]*)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    ]
    for line in [*lines, *quoted]:
        found = re.search(r"(?:^|[ /])esper (?!=|--help|--version)(.*)", line.strip())
        if found and not line.startswith(("import", "from", "#")):
            said = found[1]
            command = next((one for one in BY_LENGTH if f"{said} ".startswith(f"{one.name} ")), None)
            rest = said.removeprefix(command.name) if command else said
            yield line.strip(), command, shlex.split(rest, comments=True)


ALL_CALLS = [(page.name, *call) for page in PAGES for call in calls(page)]


def settings(words: list[str]) -> tuple[str, ...]:
    """What follows each `--set`."""
    return tuple(value for option, value in pairwise(words) if option == "--set")


@cache
def options(name: str) -> set[str]:
    """All that a command's help names."""
    shown = io.StringIO()
    with redirect_stdout(shown), pytest.raises(SystemExit):
        main([*name.split(), "--help"])
    return set(re.findall(r"--[a-z][a-z-]*", shown.getvalue()))


def test_the_pages_name_every_command():
    assert {command.name for _, _, command, _ in ALL_CALLS if command} == {command.name for command in COMMANDS}


def test_commands_and_their_options_exist():
    wrong = [f"{page}: no such command: {line}" for page, line, command, _ in ALL_CALLS if command is None]
    for page, line, command, words in ALL_CALLS:
        named = {word.partition("=")[0] for word in words if word.startswith("--")}
        if command is not None and (unknown := named - options(command.name)):
            wrong.append(f"{page}: {', '.join(sorted(unknown))} is no option: {line}")
    assert wrong == []


def test_settings_exist_and_take_these_values(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(FILES, str(ROOT / "examples" / "own_suite.py"))
    in_calls = {settings(words) for _, _, command, words in ALL_CALLS if command and command.name in TRAINING}
    in_prose = {(one,) for page in PAGES for one in re.findall(r"`--set ([^`\s]+)`", page.read_text())}
    wrong: list[str] = []
    for assignments in sorted(in_calls | in_prose):
        try:
            load_settings(TrainSettings, None, [re.sub(r"=[A-Z]$", "=1", one) for one in assignments])
        except ConfigError as error:
            wrong.append(f"{' '.join(assignments)}: {error}")
    assert wrong == []


def imports(page: Path) -> Iterator[str]:
    """Each import in the Python blocks of a page, as one statement."""
    for block in re.findall(r"^ *```python\n(.*?)^ *```", page.read_text(), re.DOTALL | re.MULTILINE):
        for node in ast.walk(ast.parse(textwrap.dedent(block))):
            if isinstance(node, ast.Import | ast.ImportFrom):
                yield ast.unparse(node)


def test_imports_of_the_pages_work():
    wrong: list[str] = []
    for page, statement in {(path.name, one) for path in PAGES for one in imports(path)}:
        if find_spec(statement.split()[1].partition(".")[0]) is None:
            continue  # an extra that is not installed
        try:
            exec(statement, {})  # noqa: S102 - a page of this repository
        except ConfigError:
            continue  # an extra of Esper that is not installed; wrong names are ImportErrors
        except ImportError as error:
            wrong.append(f"{page}: {statement}: {error}")
    assert wrong == []


def test_files_that_pages_name_are_there():
    missing: list[str] = []
    for page in PAGES:
        text = page.read_text()
        links = [link for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link]
        paths = re.findall(r"(?<![\w/.-])((?:tests|benchmarks|examples|src)/[\w/.-]+\.\w+)", text)
        bare = re.findall(r"`(test_\w+\.py)`", text)
        missing += [f"{page.name}: {link}" for link in links if not (page.parent / link).exists()]
        # The lineage names tests by their path below tests/, of which some are of benchmarks.
        missing += [
            f"{page.name}: {path}" for path in paths if not ((ROOT / path).exists() or (ROOT / "tests" / path).exists())
        ]
        missing += [f"{page.name}: {name}" for name in bare if not list((ROOT / "tests").rglob(name))]
    assert missing == []


def test_the_lineage_answers_every_defect():
    assert list(read_lineage()) == [f"D{number}" for number in range(1, DEFECTS + 1)]


def test_the_lineage_names_tests_that_exist():
    wrong: list[str] = []
    for defect, named in read_lineage().items():
        for file, _, test in (name.partition("::") for name in named if name != CHECK):
            code = (ROOT / file).read_text() if (ROOT / file).is_file() else ""
            wrong += [] if f"def {test}(" in code else [f"{defect}: {file}: {test}"]
        assert named
    assert wrong == []


@pytest.mark.landing
def test_the_architecture_page_shows_the_code_as_it_is():
    found = subprocess.run(
        [sys.executable, ROOT / "docs" / "draw_rooms.py", "--check"], capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr


def test_the_architecture_page_names_files_and_functions_that_exist():
    page = (ROOT / "docs" / "architecture.md").read_text()
    answers = re.findall(r"`(src/esper/\S+\.py)`:((?:.|\n)*?)(?=\n\d\. |\n\n)", page)
    assert len(answers) == 14
    assert all((ROOT / path).is_file() for path in re.findall(r"`(src/esper/\S+\.py)`", page))
    for path, words in answers:
        code = (ROOT / path).read_text()
        for name in re.findall(r"`(\w+)(?:\.(\w+))?`", words):
            if name[0] not in {"E", "lint", "Population"} and name != ("run", "db"):
                assert all(re.search(rf"(def|class) {part}\b", code) for part in name if part), (path, name)


# What a paper cites is the version that is there.


def test_the_bibtex_of_the_page_for_papers_is_the_citation() -> None:
    root = Path(__file__).parents[1]
    citation = yaml.safe_load((root / "CITATION.cff").read_text())
    assert citation["version"] == esper.__version__
    assert {"cff-version", "message", "title", "authors", "license"} <= set(citation)
    fields = dict(re.findall(r"^  (\w+) += \{+([^{}]*)\}+", (root / "docs/how-to/paper.md").read_text(), re.MULTILINE))
    assert fields == {
        "title": citation["title"],
        "author": citation["authors"][0]["name"],
        "version": esper.__version__,
        "license": citation["license"],
    }
