"""A report as a list of blocks, rendered as one self-contained HTML file or as Markdown with its charts beside it."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape


@dataclass(frozen=True, slots=True)
class Heading:
    text: str


@dataclass(frozen=True, slots=True)
class Text:
    """One paragraph. No markup."""

    text: str


@dataclass(frozen=True, slots=True)
class Table:
    """Cells are text; columns after the first are figures."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Chart:
    """`name` is its file's, without the ending."""

    name: str
    caption: str
    svg: str


Block = Heading | Text | Table | Chart

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #24292f; background: #fff; max-width: 70rem; margin: 2rem auto;
  padding: 0 1rem }
h1, h2 { line-height: 1.2 } h2 { margin-top: 2rem; border-bottom: 1px solid #d8dee4; padding-bottom: .2rem }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums }
th, td { border: 1px solid #d8dee4; padding: .2rem .6rem; text-align: right }
th:first-child, td:first-child { text-align: left }
figure { display: inline-block; margin: .5rem } figcaption { font-size: 13px; color: #57606a; max-width: 640px }
"""


def html(title: str, blocks: Sequence[Block]) -> str:
    """A whole page that loads nothing else."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<h1>{escape(title)}</h1>\n"
        + "\n".join(map(_html_block, blocks))
        + "\n</body>\n</html>\n"
    )


def _html_block(block: Block) -> str:
    match block:
        case Heading(text):
            return f"<h2>{escape(text)}</h2>"
        case Text(text):
            return f"<p>{escape(text)}</p>"
        case Chart(_, caption, svg):
            return f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>"
        case Table(head, rows):
            lines = ["<table>", f"<tr>{''.join(f'<th>{escape(cell)}</th>' for cell in head)}</tr>"]
            lines += [f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows]
            return "\n".join([*lines, "</table>"])


def markdown(blocks: Sequence[Block], folder: str) -> str:
    """Charts are linked as files of `folder`, a path from the page."""
    return "\n\n".join(_markdown_block(block, folder) for block in blocks) + "\n"


def _markdown_block(block: Block, folder: str) -> str:
    match block:
        case Heading(text):
            return f"### {text}"
        case Text(text):
            return text
        case Chart(name, caption, _):
            return f"![{caption}]({folder}/{name}.svg)"
        case Table(head, rows):
            lines = [_row(head), "|---" + "|---:" * (len(head) - 1) + "|"]
            return "\n".join([*lines, *map(_row, rows)])


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"
