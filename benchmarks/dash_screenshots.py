"""Pictures of every view of the dashboard: `python benchmarks/dash_screenshots.py RUNS`.

RUNS is a folder with at least one run of `esper train` and one of a `Grower`; pictures show the newest of each, and the
table of all runs. They go to docs/images/dash-*.png: each view in light colours, 1280 pixels wide, the population also
in dark colours and the learning view 400 pixels wide.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote
from urllib.request import urlopen

from playwright.sync_api import sync_playwright

IMAGES = Path(__file__).parents[1] / "docs" / "images"
SETTLED_MS = 2500


@dataclass(frozen=True)
class Picture:
    name: str
    view: str
    command: str = "train"
    """What the run must be of."""
    choices: str = ""
    width: int = 1280
    height: int = 900
    scheme: str = "light"


PICTURES = (
    Picture("runs", "runs", height=560),
    Picture("model", "model", "grow"),
    Picture("population", "population"),
    Picture("network", "network"),
    Picture("learning", "learning", choices="&smooth=0.6"),
    Picture("compare", "compare"),
    Picture("events", "events", height=560),
    Picture("dark", "population", scheme="dark"),
    Picture("narrow", "learning", choices="&smooth=0.6", width=400),
)


def main(folder: str) -> None:
    words = [sys.executable, "-m", "esper", "dash", folder, "--no-browser", "--port", "0"]
    server = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        address = server.stdout.readline().removeprefix("dashboard: ").strip()
        with urlopen(f"{address}api/runs") as answer:
            runs = sorted(json.load(answer)["runs"], key=lambda run: run.get("started") or 0)
        take(address, {run["command"]: run["name"] for run in runs if "command" in run})
    finally:
        server.terminate()
        server.wait()


def take(address: str, newest: dict[str, str]) -> None:
    """Take all pictures of the newest run by the command that made it."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for picture in PICTURES:
            size = {"width": picture.width, "height": picture.height}
            page = browser.new_page(viewport=size, color_scheme=picture.scheme)
            page.goto(f"{address}#/{picture.view}?run={quote(newest[picture.command])}{picture.choices}")
            page.wait_for_selector("main canvas, .log li, .runs td")
            page.wait_for_timeout(SETTLED_MS)
            page.screenshot(path=IMAGES / f"dash-{picture.name}.png")
            page.close()
        browser.close()


if __name__ == "__main__":
    (folder,) = sys.argv[1:]
    main(folder)
