"""What a paper cites is the version that is there."""

from __future__ import annotations

from pathlib import Path

import yaml

import esper


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((Path(__file__).parents[1] / "CITATION.cff").read_text())
    assert citation["version"] == esper.__version__
    assert {"cff-version", "message", "title", "authors", "license"} <= set(citation)
