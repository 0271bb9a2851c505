"""Whatever the cells hold, LaTeX gets a table of them."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from esper.dash.formats import MINUS, count
from esper.lab.figures.exhibit import Column, Query, Rows, Table
from esper.lab.figures.export import escape_latex, to_latex

TABLE = Table(
    "names",
    "All & everything",
    Query("SELECT 1"),
    (Column("name"), Column("seeds", count)),
    "nothing",
)
COMMAND = re.compile(r"\\(?:[a-z]+\{\}|[{}$&#%_])|\{[\[*]\}|-\{\}|\$-\$")
SPECIAL = "\\{}$&#%_~^<>|\"`[*'-a1\n\t " + MINUS


@given(st.text(SPECIAL))
def test_nothing_special_is_left(words: str) -> None:
    rest = COMMAND.sub("", escape_latex(words))
    assert not set(rest) & set('\\{}$&#%_~^<>|"`[*\n\t')
    assert "--" not in escape_latex(words)


@given(st.text(SPECIAL), st.text(SPECIAL))
def test_a_table_has_as_many_rows_and_cells_as_its_rows(first: str, second: str) -> None:
    lines = to_latex(TABLE, Rows(("name", "seeds"), ((first, 1), (second, 2000)))).splitlines()
    assert [line for line in lines if line.endswith("rule")] == [r"\toprule", r"\midrule", r"\bottomrule"]
    body = lines[lines.index(r"\midrule") + 1 : lines.index(r"\bottomrule")]
    assert [len(re.findall(r"(?<!\\)&", line)) for line in body] == [1, 1]
    assert [line.endswith(r" \\") for line in body] == [True, True]
    assert body[1].endswith(r"& 2,000 \\")


def test_known_signs() -> None:
    assert escape_latex("a_b & 5%") == r"a\_b \& 5\%"
    assert escape_latex(f"{MINUS}1 -- [x]") == r"$-$1 -{}- {[}x]"
    assert r"\caption{All \& everything}" in to_latex(TABLE, Rows(("name", "seeds"), ()))


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="needs pdflatex")
def test_it_compiles(tmp_path: Path) -> None:
    body = to_latex(TABLE, Rows(("name", "seeds"), ((SPECIAL, 1), ("[x]", 2), ("*", None))))
    packages = r"\usepackage[T1]{fontenc}\usepackage{textcomp}\usepackage{booktabs}"
    document = rf"\documentclass{{article}}{packages}\begin{{document}}{body}\end{{document}}"
    (tmp_path / "paper.tex").write_text(document)
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "paper.tex"]
    assert subprocess.run(command, cwd=tmp_path, check=False, capture_output=True).returncode == 0
