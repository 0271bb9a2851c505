"""The pages of the site: those of docs/, and whatever else of the repository they link to."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from docs.builder.drawings import tabulate_charts
from docs.builder.notebooks import to_markdown

ROOT = Path(__file__).parents[2]
DOCS = PurePosixPath("docs")
OUTSIDE = PurePosixPath("repository")
"""Folder of the site for files of the repository that are not in docs/."""
ALWAYS = ("CHANGELOG.md", "CONTRIBUTING.md", "README.md", "docs/site.css")
"""Files that no page links to: mkdocs.yml names them."""

LONGEST = 30_000
"""Characters of a changelog on one page."""

_FENCED = re.compile(r"(^ *```.*?^ *```[^\S\n]*$)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<=\]\()([^)#\s:]+)(?=[)#])")
_LANGUAGES = {".py": "python", ".toml": "toml", ".yml": "yaml", ".yaml": "yaml", ".sh": "bash"}


def write_pages(folder: Path) -> None:
    """Write all pages and pictures into an empty ``folder``.

    Raises:
        FileNotFoundError: a page links to a file that is not there.
    """
    waiting = [_relative(path) for path in sorted((ROOT / DOCS).rglob("*")) if _belongs(path)]
    waiting += [PurePosixPath(name) for name in ALWAYS]
    written: set[PurePosixPath] = set()
    while waiting:
        source = waiting.pop()
        if source in written:
            continue
        written.add(source)
        target = folder / place_of(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        content, linked = _render(source)
        target.write_bytes(content)
        if source.name == "CHANGELOG.md":
            write_parts(target)
        waiting += linked


def write_parts(page: Path) -> None:
    """Move what makes a page longer than `LONGEST` to further pages, section by section; each links to the next."""
    parts = [""]
    for section in re.split(r"^(?=##+ )", page.read_text(), flags=re.MULTILINE):
        if parts[-1] and len(parts[-1]) + len(section) > LONGEST:
            parts.append(f"# {page.stem.capitalize()}, continued\n\n")
        parts[-1] += section
    files = [page, *(page.with_stem(f"{page.stem}-{number}") for number in range(2, len(parts) + 1))]
    for file, part, following in zip(files, parts, [*files[1:], None], strict=True):
        file.write_text(part if following is None else f"{part}\n[Continued on the next page]({following.name})\n")


def place_of(source: PurePosixPath) -> PurePosixPath:
    """Where a file or folder of the repository is in the site."""
    place = source.relative_to(DOCS) if source.is_relative_to(DOCS) else OUTSIDE / source
    if (ROOT / source).is_dir():
        return place / "files.md"
    if place.suffix == ".md":
        return place.with_name(place.name.lower())  # a README.md would be the index of its folder
    if place.suffix == ".ipynb":
        return place.with_suffix(".md")
    return place if _is_copied(place) else place.with_name(f"{place.name}.md")


def redirect_links(text: str, source: PurePosixPath) -> tuple[str, list[PurePosixPath]]:
    """A page with the links of its file made those of the site, and the files that it links to."""
    linked: list[PurePosixPath] = []

    def redirect(found: re.Match[str]) -> str:
        target = PurePosixPath(os.path.normpath(source.parent / found[1]))
        if not (ROOT / target).exists():
            raise FileNotFoundError(f"{source} links to {found[1]}, which is not there")
        linked.append(target)
        return os.path.relpath(place_of(target), place_of(source).parent)

    return _outside_code(text, lambda part: _LINK.sub(redirect, part)), linked


def _render(source: PurePosixPath) -> tuple[bytes, list[PurePosixPath]]:
    path = ROOT / source
    if path.is_dir():
        lines = [f"- [{one.name}]({one.name})" for one in sorted(path.iterdir()) if one.suffix in _LANGUAGES]
        text = "\n".join([f"# {source}", "", *lines, ""])
        text, linked = redirect_links(text, source / "files.md")
    elif _is_copied(source):
        return path.read_bytes(), []
    elif source.suffix == ".md":
        text, linked = redirect_links(tabulate_charts(path.read_text()), source)
    elif source.suffix == ".ipynb":
        text, linked = redirect_links(to_markdown(path.read_text()), source)
    else:
        language = _LANGUAGES.get(source.suffix, "text")
        text, linked = f"# {source.name}\n\n`{source}`\n\n````{language}\n{path.read_text()}````\n", []
    return text.encode(), linked


def _outside_code(text: str, change: Callable[[str], str]) -> str:
    """The text with all that is in no fenced block changed."""
    return "".join(part if index % 2 else change(part) for index, part in enumerate(_FENCED.split(text)))


def _belongs(path: Path) -> bool:
    return path.suffix in {".md", ".ipynb"} and "builder" not in path.parts


def _is_copied(path: PurePosixPath) -> bool:
    return path.suffix in {".png", ".svg", ".gif", ".css"}


def _relative(path: Path) -> PurePosixPath:
    return PurePosixPath(path.relative_to(ROOT).as_posix())
