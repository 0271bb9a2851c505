"""The built site in a real browser: pages of a length that can be read, code that is not cut off, and search."""

import functools
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path

import pytest
from playwright.sync_api import Page, sync_playwright

import esper
from docs.builder.pages import ROOT

CHROMIUM = shutil.which("chromium")
TALLEST = 15_000
"""Pixels at a width of 1280."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("zensical") is None, reason="needs the extra docs"),
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium: apt install chromium"),
]


@pytest.fixture(scope="module")
def site() -> Path:
    """As `make docs` builds it, into build/ and site/ of this checkout."""
    result = subprocess.run(
        [sys.executable, "-m", "docs.builder"], check=False, capture_output=True, text=True, cwd=ROOT
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return ROOT / "site"


class Handler(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser.new_page(viewport={"width": 1280, "height": 800})
        browser.close()


def test_every_public_name_has_its_heading_in_one_page_of_the_reference(site: Path) -> None:
    pages = [page.read_text() for page in (site / "reference").glob("*.html")]
    headings = {name: sum(f'id="esper.{name}"' in page for page in pages) for name in esper.__all__}
    assert headings == dict.fromkeys(esper.__all__, 1)


def test_no_page_is_too_tall_and_no_code_is_cut_off(site: Path, address: str, page: Page) -> None:
    heights: dict[str, int] = {}
    clipped: list[str] = []
    for file in sorted(site.rglob("*.html")):
        name = str(file.relative_to(site))
        page.goto(f"{address}/{name}")
        heights[name] = page.evaluate("document.documentElement.scrollHeight")
        wide = "[...document.querySelectorAll('pre code')].some(code => code.scrollWidth > code.clientWidth + 1)"
        clipped += [name] if page.evaluate(wide) else []
    assert len(heights) > 50
    assert {name: height for name, height in heights.items() if height > TALLEST} == {}
    assert clipped == []


def test_search_finds_attach_first(address: str, page: Page) -> None:
    page.goto(f"{address}/index.html")
    page.keyboard.press("/")
    page.locator("input:focus").press_sequentially("esper.attach")  # once the field is there
    first = page.locator("a[href*='esper.attach']").first
    first.wait_for()
    assert "reference/growth.html#esper.attach" in (first.get_attribute("href") or "")
