"""Draw the pictures of the front page and of the concepts from a run that is made anew: half a minute on one core.

python docs/draw_pictures.py
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from esper.cli import main

IMAGES = Path(__file__).parent / "images"
GROW = ["grow", "--task", "mnist1d", "--host", "conv1d", "--epochs", "30", "--seed", "1"]
FIGURES = {"snapshots": "growth", "stages": "life", "contributions": "attribution"}
"""Figures of the run's report, and the names that the pictures have here."""


def draw(folder: Path) -> None:
    """Write all pictures, made from a run in ``folder``."""
    run, report = str(folder / "run"), folder / "report"
    require([*GROW, "--run-dir", run])
    require(["report", run, "--out", str(report)])
    for figure, name in FIGURES.items():
        shutil.copy(report / "figures" / f"{figure}.svg", IMAGES / f"{name}.svg")
    look = ["--task", "mnist1d", "--host", "conv1d", "--after", "3", "--seed", "1"]
    require(["look", *look, "--svg", str(IMAGES / "promise.svg")])


def require(words: list[str]) -> None:
    """Run a command of Esper; end if it fails."""
    if code := main(words):
        sys.exit(code)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        draw(Path(made))
