"""Reports that stand alone."""

from html.parser import HTMLParser

from prfaas.sim.document import Chart, Heading, Table, Text, html, markdown
from prfaas.sim.plots import Line, line_chart

BLOCKS = [
    Heading("Rates <1>"),
    Text("Fewer & slower."),
    Table(["item", "wanted"], [["a | b", ">= 1"]]),
    Chart("rates", "Rates over time", line_chart("Rates", "x", "y", [Line("l", [(0, 1), (1, 2)])])),
]


class Loads(HTMLParser):
    """What a page would fetch, and which elements it has."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.elements: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.add(tag)
        self.fetched += [value or "" for name, value in attrs if name in ("src", "href")]


def test_a_page_of_html_needs_nothing_else():
    """Charts are inside of it and nothing is fetched."""
    page = Loads()
    page.feed(html("A report", BLOCKS))
    assert page.fetched == []
    assert {"h1", "h2", "p", "table", "svg", "path"} <= page.elements


def test_text_is_escaped_in_html():
    """What looks like markup is shown, not obeyed."""
    text = html("a < b", BLOCKS)
    assert "Rates &lt;1&gt;" in text and "Fewer &amp; slower." in text and "<title>a &lt; b</title>" in text


def test_markdown_links_its_charts_and_keeps_its_columns():
    """A bar in a cell does not begin another column."""
    text = markdown(BLOCKS, "reproduction")
    assert "![Rates over time](reproduction/rates.svg)" in text
    row = next(line for line in text.splitlines() if ">= 1" in line)
    assert row.count("|") == 3
