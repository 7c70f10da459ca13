"""What the documents say can be followed: links lead somewhere, and pages that are generated are fresh."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import click
import pytest

from prfaas import config
from prfaas.version import VERSION
from services.cli import main
from services.router.openai.document import OPERATIONS, openapi
from tools.generate_docs import PAGES, stale
from tools.reference import cli, configuration

ROOT = Path(__file__).resolve().parents[3]
DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "deploy/**/*.md")
    for path in ROOT.glob(pattern)
    if ".venv" not in path.parts
)
LINK = re.compile(r"(?<!`)!?\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#{1,6} +(.+?) *$", re.MULTILINE)
MAKE = re.compile(r"^(?:sudo )?make ([a-z-]+)", re.MULTILINE)
COMMAND = re.compile(r"^(?:\$ |\S*/bin/)?prfaas((?: [a-z][a-z-]*)+)", re.MULTILINE)
INLINE = re.compile(r"`prfaas((?: [a-z][a-z-]*)+)")


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def broken_links(path: Path) -> Iterator[str]:
    for target in LINK.findall(FENCE.sub("", text_of(path))):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = unquote(target).partition("#")
        place = path if not name else path.parent / name
        if not place.exists():
            yield f"{target}: there is no such file"
        elif anchor and place.suffix == ".md" and anchor not in set(anchors(text_of(place))):
            yield f"{target}: there is no such heading"


def anchors(text: str) -> Iterator[str]:
    """As GitHub makes them of headings: a heading that comes again gets a number."""
    seen: dict[str, int] = {}
    for heading in HEADING.findall(FENCE.sub("", text)):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").replace("*", "")
        anchor = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        yield f"{anchor}-{seen[anchor]}" if anchor in seen else anchor
        seen[anchor] = seen.get(anchor, 0) + 1


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path):
    """Every relative link names a file that is there, and a heading in it."""
    assert [*broken_links(path)] == []


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path):
    """Files and headings that are not there are told; what is in a block of code is no link."""
    page = tmp_path / "page.md"
    page.write_text(
        "# One `word`\n[a](#one-word) [b](#two) [c](none.md) [d](https://example.com)\n```\n[e](x.md)\n```\n"
    )
    assert [*broken_links(page)] == ["#two: there is no such heading", "none.md: there is no such file"]


def test_headings_that_are_the_same_have_anchors_of_their_own():
    """As GitHub numbers them."""
    assert [*anchors("# A b\n## A b\n## C, d!\n")] == ["a-b", "a-b-1", "c-d"]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_that_are_named_exist(path: Path):
    """A target of make, or a command of prfaas, that a document tells to run is there."""
    text = "\n".join(FENCE.findall(text_of(path)))
    targets = set(re.findall(r"^([a-z-]+):", text_of(ROOT / "Makefile"), re.MULTILINE))
    assert {*MAKE.findall(text)} - targets == set()
    named = COMMAND.findall(text) + INLINE.findall(text_of(path))
    unknown = [words for words in named if not _known(words.split())]
    assert unknown == []


def _known(words: list[str]) -> bool:
    """Whether the first word, and within a group the second, is a command."""
    command: click.Command = main
    for word in words:
        if not isinstance(command, click.Group):
            return True
        if word not in command.commands:
            return False
        command = command.commands[word]
    return True


def test_a_page_that_is_not_what_the_code_says_is_stale(tmp_path: Path):
    """One that was changed by hand, and one that is missing."""
    for name, page in PAGES.items():
        (tmp_path / name).write_text(page(), encoding="utf-8")
    assert [*stale(tmp_path)] == []
    (tmp_path / "cli.md").unlink()
    (tmp_path / "api.md").write_text("# HTTP API\n", encoding="utf-8")
    assert [*stale(tmp_path)] == ["api.md", "cli.md"]


def test_the_reference_has_every_setting_command_and_request():
    """What is not there cannot be looked up."""
    settings, commands, requests = (PAGES[f"{name}.md"]() for name in ("configuration", "cli", "api"))
    assert [f for s, f in config.fields() if f"`PRFAAS_{s}_{f.name}`".upper() not in settings.upper()] == []
    assert [path for path, _ in cli.commands("prfaas", main) if f"## {path}\n" not in commands] == []
    assert [each.path for each in OPERATIONS if f"`{each.method.upper()} {each.path}`" not in requests] == []


def test_types_and_defaults_are_told_as_they_are_written():
    """Sizes also in units, choices as choices, what may be absent as absent."""
    page = configuration.page()
    assert "`1073741824` (1 GiB)" in page
    assert "| `mode` | `PRFAAS_ROUTING_MODE` | `auto`, `always`, `never` | `auto` |" in page
    assert "| float (> 0, ≤ 1) | `0.95` |" in page
    assert "| int or absent | absent |" in page


def test_the_version_is_written_once():
    """The package has no version of its own, and the API's document says the same one."""
    project = tomllib.loads(text_of(ROOT / "pyproject.toml"))
    assert project["project"]["dynamic"] == ["version"] and "version" not in project["project"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "prfaas.version.VERSION"}
    assert openapi(needs_key=False)["info"]["version"] == VERSION


def test_the_chart_is_of_this_version():
    """It installs images of the release that it came with."""
    chart = text_of(ROOT / "deploy" / "helm" / "prfaas" / "Chart.yaml")
    assert re.findall(r'^appVersion: "?([^"\n]+)"?$', chart, re.MULTILINE) == [VERSION]
