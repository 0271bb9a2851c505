"""What may be wrong with a built site: dead links, names without a heading, and requests to other hosts."""

from __future__ import annotations

import os
from collections.abc import Collection
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

HEADINGS = {f"h{level}" for level in range(1, 7)}
FETCHING = {"img": "src", "script": "src", "link": "href", "iframe": "src", "source": "src", "video": "src"}
"""Attributes whose address a browser asks for on its own."""
FOR_PROGRAMS = {"canonical", "next", "prev"}
"""Kinds of `link` that no browser follows on its own."""


class Page(HTMLParser):
    """What a page links to, what can be linked to in it, and what it makes browsers fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.headings: set[str] = set()
        self.fetched: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value for name, value in attrs if value}
        names = {found[name] for name in ("id", "name") if name in found}
        self.anchors |= names
        if tag in HEADINGS:
            self.headings |= names
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        address = found.get(FETCHING.get(tag, ""))
        if address and found.get("rel") not in FOR_PROGRAMS:
            self.fetched.append(address)


def find_faults(site: Path, names: Collection[str]) -> list[str]:
    """A line for each fault of the site in that folder, in which each of ``names`` is to be a heading's anchor."""
    pages = {path: Page(path.read_text()) for path in sorted(site.rglob("*.html"))}
    faults = [] if site / "index.html" in pages else ["index.html is missing"]
    for path, page in pages.items():
        where = path.relative_to(site)
        if where.name != "404.html":  # its addresses are those of the site's root, wherever that is
            faults += [f"{where}: {link} leads nowhere" for link in page.links if not _leads(path, link, pages)]
            faults += [f"{where}: {one} is not there" for one in page.fetched if not _is_there(path, one)]
        faults += [f"{where}: fetches {one}" for one in page.fetched if urlsplit(one).netloc]
    found = {anchor for page in pages.values() for anchor in page.headings}
    return faults + [f"{name}: no heading in the reference" for name in names if name not in found]


def _leads(page: Path, link: str, pages: dict[Path, Page]) -> bool:
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return True
    target = _resolve(page, parts.path)
    if not target.exists():
        return False
    return not parts.fragment or target not in pages or unquote(parts.fragment) in {*pages[target].anchors, "__top"}


def _is_there(page: Path, address: str) -> bool:
    parts = urlsplit(address)
    return bool(parts.scheme or parts.netloc) or _resolve(page, parts.path).exists()


def _resolve(page: Path, path: str) -> Path:
    if not path:
        return page
    target = Path(os.path.normpath(page.parent / unquote(path)))
    return target / "index.html" if target.is_dir() else target
