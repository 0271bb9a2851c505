"""Whatever the text, it comes back as text."""

from __future__ import annotations

from html.parser import HTMLParser

from hypothesis import given
from hypothesis import strategies as st

from esper.ui.report.markup import element, render

TEXT = st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=30)


class Reader(HTMLParser):
    """Collects tags, attributes and text."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.values: list[str | None] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.values += [value for _, value in attrs]

    def handle_data(self, data: str) -> None:
        self.text += data


@given(TEXT, TEXT)
def test_text_and_attributes_are_escaped(content: str, value: str):
    reader = Reader()
    reader.feed(render(element("p", content, title=value)))
    reader.close()
    assert reader.tags == ["p"]
    assert reader.values == [value]
    assert reader.text == content


def test_attributes_are_written_as_html_has_them():
    found = render(element("line", x1=0, y2=1 / 3, stroke_width=2.0, class_="grid", viewBox="0 0 1 1"))
    assert found == '<line x1="0" y2="0.333333" stroke-width="2" class="grid" viewBox="0 0 1 1"></line>'


def test_elements_without_content_are_not_closed():
    assert render(element("meta", charset="utf-8")) == '<meta charset="utf-8">'
