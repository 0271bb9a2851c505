"""Build the site: ``python -m docs.builder`` in the repository's folder, or `make docs`.

Pages are copied, the reference is filled from the code, Zensical renders both without a network, and what came out is
checked: links, headings of all public names, and that no page asks another host for anything.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from docs.builder.checks import find_faults
from docs.builder.pages import ROOT, write_pages
from docs.builder.reference import fill_lists, find_gaps, public_names

PAGES = ROOT / "build" / "docs"
SITE = ROOT / "site"


def main() -> int:
    """Exit code 1 if something is undocumented, a link leads nowhere, or the site could not be built."""
    if gaps := find_gaps():
        return _fail("missing in the reference", gaps)
    for folder in (PAGES, SITE):
        shutil.rmtree(folder, ignore_errors=True)
    PAGES.mkdir(parents=True)
    write_pages(PAGES)
    for page in (PAGES / "reference").glob("*.md"):
        page.write_text(fill_lists(page.read_text()))
    zensical = Path(sys.executable).with_name("zensical")
    if subprocess.run([zensical, "build", "--strict", "--clean"], cwd=ROOT, check=False).returncode:
        return 1
    faults = find_faults(SITE, public_names())
    if faults:
        return _fail("wrong with the built site", faults)
    sys.stdout.write(f"site: {SITE / 'index.html'}\n")
    return 0


def _fail(what: str, found: list[str]) -> int:
    sys.stderr.writelines([f"{what}:\n", *(f"  {one}\n" for one in found)])
    return 1


if __name__ == "__main__":
    sys.exit(main())
