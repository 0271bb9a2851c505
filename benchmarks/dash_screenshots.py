"""Pictures of every view of the dashboard: `python benchmarks/dash_screenshots.py RUN [OTHER_RUNS...]`.

They go to docs/images/dash-*.png: each view in light colours, 1280 pixels wide, the population also in dark colours and
the learning view 400 pixels wide.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from playwright.sync_api import sync_playwright

IMAGES = Path(__file__).parents[1] / "docs" / "images"
SETTLED_MS = 2500


@dataclass(frozen=True)
class Picture:
    name: str
    view: str
    width: int = 1280
    height: int = 900
    scheme: str = "light"


PICTURES = (
    Picture("population", "population"),
    Picture("network", "network"),
    Picture("learning", "learning"),
    Picture("compare", "compare"),
    Picture("events", "events", height=560),
    Picture("dark", "population", scheme="dark"),
    Picture("narrow", "learning", width=400),
)


def main(runs: list[str]) -> None:
    words = [sys.executable, "-m", "esper", "dash", *runs, "--no-browser", "--port", "0"]
    server = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        address = server.stdout.readline().removeprefix("dashboard: ").strip()
        take(address, Path(runs[0]).absolute().name)
    finally:
        server.terminate()
        server.wait()


def take(address: str, run: str) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for picture in PICTURES:
            size = {"width": picture.width, "height": picture.height}
            page = browser.new_page(viewport=size, color_scheme=picture.scheme)
            page.goto(f"{address}#/{picture.view}?run={quote(run)}")
            page.wait_for_selector("main canvas, .log li")
            page.wait_for_timeout(SETTLED_MS)
            page.screenshot(path=IMAGES / f"dash-{picture.name}.png")
            page.close()
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1:])
