"""Build the site: ``python -m docs.builder`` in the repository's folder, or `make docs`.

Pages are copied, the reference is filled from the code, Zensical renders both without a network, and what came out is
checked: links, headings of all public names, and that no page asks another host for anything.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

from docs.builder.checks import find_faults
from docs.builder.pages import ROOT, write_pages
from docs.builder.reference import fill_lists, find_gaps, public_names

PAGES = ROOT / "build" / "docs"
SITE = ROOT / "site"
_FOUND_BY_LINKS = ("repository", "notebooks")


def main() -> int:
    """Exit code 1 if something is undocumented, a link leads nowhere, or the site could not be built."""
    if gaps := find_gaps():
        return _fail("missing in the reference", gaps)
    for folder in (PAGES, SITE):
        shutil.rmtree(folder, ignore_errors=True)
    PAGES.mkdir(parents=True)
    try:
        write_pages(PAGES)
    except FileNotFoundError as error:
        return _fail("a dead link", [str(error)])
    for page in (PAGES / "reference").glob("*.md"):
        page.write_text(fill_lists(page.read_text()))
    if strays := _find_strays():
        return _fail("in no part of the navigation of mkdocs.yml", strays)
    zensical = Path(sys.executable).with_name("zensical")
    if subprocess.run([zensical, "build", "--strict", "--clean"], cwd=ROOT, check=False).returncode:
        return 1
    faults = find_faults(SITE, public_names())
    if faults:
        return _fail("wrong with the built site", faults)
    sys.stdout.write(f"site: {SITE / 'index.html'}\n")
    return 0


def _find_strays() -> list[str]:
    """Pages that nobody finds from the start page; files of the repository and notebooks are found by links."""
    named = set(re.findall(r"[\w./-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    pages = (page.relative_to(PAGES) for page in PAGES.rglob("*.md"))
    return sorted(str(page) for page in pages if page.parts[0] not in _FOUND_BY_LINKS and str(page) not in named)


def _fail(what: str, found: list[str]) -> int:
    sys.stderr.writelines([f"{what}:\n", *(f"  {one}\n" for one in found)])
    return 1


if __name__ == "__main__":
    sys.exit(main())
