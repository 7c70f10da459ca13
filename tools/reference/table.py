"""Tables and headings of Markdown, as all pages of the reference have them."""

from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [_line(head), "|" + "---|" * len(head), *(_line(row) for row in rows)]
    return "\n".join(lines)


def code(text: str) -> str:
    return f"`{text}`"


def _line(cells: Sequence[str]) -> str:
    """A bar or a line's end within a cell would end the cell."""
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"
