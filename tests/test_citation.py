"""What a paper cites is the version that is there."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

import esper


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((Path(__file__).parents[1] / "CITATION.cff").read_text())
    assert citation["version"] == esper.__version__
    assert {"cff-version", "message", "title", "authors", "license"} <= set(citation)


def test_the_bibtex_of_the_page_for_papers_is_the_citation() -> None:
    root = Path(__file__).parents[1]
    citation = yaml.safe_load((root / "CITATION.cff").read_text())
    fields = dict(re.findall(r"^  (\w+) += \{+([^{}]*)\}+", (root / "docs/how-to/paper.md").read_text(), re.MULTILINE))
    assert fields == {
        "title": citation["title"],
        "author": citation["authors"][0]["name"],
        "version": esper.__version__,
        "license": citation["license"],
    }
