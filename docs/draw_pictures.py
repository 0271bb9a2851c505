"""Draw the pictures of the front page and of the concepts from a run that is made anew: half a minute on one core.

python docs/draw_pictures.py
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from esper.cli import main
from esper.lab.drawing import export_exhibits
from esper.lab.exhibit import Drawing, group_rows
from esper.lab.report import report_grown
from esper.runs.run_directory import RunDirectory

IMAGES = Path(__file__).parent / "images"
EXAMPLES = Path(__file__).parents[1] / "examples"
HOST = ["--task", "mnist1d", "--host", "conv1d", "--seed", "1"]
FIGURES = {"snapshots": "growth", "stages": "life", "contributions": "attribution"}
"""Figures of the run's report, and the names that the pictures have here."""


def draw(folder: Path) -> None:
    """Write all pictures, made from a run in ``folder``."""
    run, report = str(folder / "run"), folder / "report"
    subprocess.run([sys.executable, EXAMPLES / "grow.py", *HOST, "--epochs", "30", "--run-dir", run], check=True)
    if code := main(["report", run, "--out", str(report)]):
        sys.exit(code)
    for figure, name in FIGURES.items():
        shutil.copy(report / "figures" / f"{figure}.svg", IMAGES / f"{name}.svg")

    # Narrow screens have three of the six moments, in a picture that is half as wide.
    exhibits = report_grown(RunDirectory(folder / "run")).exhibits
    (snapshots,) = (one for one in exhibits if isinstance(one, Drawing) and one.name == "snapshots")
    moments = group_rows(snapshots.rows, "decision")
    rows = [row for number in list(moments)[1::2] for row in moments[number]]
    export_exhibits(folder / "narrow", [replace(snapshots, rows=rows, columns=1)])
    shutil.copy(folder / "narrow" / "figures" / "snapshots.svg", IMAGES / "growth-narrow.svg")

    look = [sys.executable, EXAMPLES / "look.py", *HOST, "--after", "3", "--svg", IMAGES / "promise.svg"]
    subprocess.run(look, check=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        draw(Path(made))
