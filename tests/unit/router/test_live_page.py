"""The file of the live page, and how the admin port serves it."""

import re
from base64 import b64encode
from hashlib import sha256
from html.parser import HTMLParser

from prfaas.config import Config
from prfaas.membership.memory import MemoryStore
from prfaas.scheduling.admission import Admission, AdmissionParams
from services.router.admin import AdminApi
from services.router.control import Control
from services.router.http.messages import HttpRequest, Response
from services.router.live_page.page import FILE
from services.router.live_page.tally import Tally

KEY = "sesame"


def admin_api() -> AdminApi:
    control = Control(Config(), MemoryStore(), "m", "r1")
    operator = control.operator(None)
    live = control.live(operator, Admission(AdmissionParams(max_running=1)), Tally(lambda: 0.0), None)
    return AdminApi(operator, KEY, live)


async def get(path: str, *, key: str = "", method: str = "GET") -> Response:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return await admin_api().handle(HttpRequest(method=method, path=path, headers=headers, received_s=0.0))


def policy(response: Response) -> dict[str, list[str]]:
    parts = dict(response.headers)["content-security-policy"].split(";")
    return {name: values for name, *values in (part.split() for part in parts)}


class Contents(HTMLParser):
    """What the elements of a page hold and name."""

    def __init__(self) -> None:
        super().__init__()
        self.inside: dict[str, list[str]] = {"script": [], "style": []}
        self.tags: set[str] = set()
        self.named: list[tuple[str, str, str]] = []
        self.ids: list[str] = []
        self._open = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._open = tag if tag in self.inside else ""
        self.tags.add(tag)
        for name, value in attrs:
            self.named.append((tag, name, value or ""))
            if name == "id":
                self.ids.append(value or "")

    def handle_data(self, data: str) -> None:
        if self._open:
            self.inside[self._open].append(data)

    def handle_endtag(self, tag: str) -> None:
        self._open = ""


def contents() -> Contents:
    parsed = Contents()
    parsed.feed(FILE.read_text(encoding="utf-8"))
    parsed.close()
    return parsed


async def test_anybody_gets_the_page_and_nobody_the_data():
    """The page is a file in which nothing is told; what it asks for needs the key."""
    response = await get("/")
    assert (response.status, response.content_type) == (200, "text/html; charset=utf-8")
    assert response.body == FILE.read_bytes()
    for path, method in (("/admin/v1/live", "GET"), ("/", "POST"), ("/live.html", "GET"), ("//", "GET")):
        for key in ("", "sesam", KEY + "x"):
            refused = await get(path, key=key, method=method)
            assert refused.status == 401 and b"r1" not in refused.body
    assert (await get("/admin/v1/live", key=KEY)).status == 200
    assert (await get("/nothing", key=KEY)).status == 404


async def test_nothing_of_it_is_kept_or_taken_for_something_else():
    for response in (await get("/"), await get("/admin/v1/live", key=KEY)):
        headers = dict(response.headers)
        assert (headers["cache-control"], headers["x-content-type-options"]) == ("no-store", "nosniff")


async def test_a_browser_may_run_what_is_in_the_file_and_ask_this_router_only():
    """No other script or style, no other address, no frame around it, and text cannot become markup."""
    allowed = policy(await get("/"))
    assert allowed["default-src"] == allowed["base-uri"] == allowed["frame-ancestors"] == ["'none'"]
    assert allowed["connect-src"] == ["'self'"] and allowed["img-src"] == ["data:"]
    assert allowed["require-trusted-types-for"] == ["'script'"] and allowed["trusted-types"] == ["'none'"]
    inside = contents().inside
    for kind in ("script", "style"):
        [content] = inside[kind]
        digest = b64encode(sha256(content.encode()).digest()).decode()
        assert allowed[f"{kind}-src"] == [f"'sha256-{digest}'"]
    assert "unsafe" not in str(allowed)


def test_the_file_needs_no_other():
    """It works where no other host can be reached."""
    parsed = contents()
    references = {value for _, name, value in parsed.named if name in ("src", "href", "action", "srcset", "data")}
    assert references == {"data:,", "#main"}
    addresses = set(re.findall(r"\b(?:https?|wss?)://[^\s\"')]+", FILE.read_text()))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a name, which is never asked for
    assert not re.search(r"@import|url\(", FILE.read_text())


def test_the_file_names_what_it_shows():
    """Landmarks, a language, headers of tables, labels of inputs, and no id twice."""
    parsed = contents()
    assert {"header", "main", "section", "form"} <= parsed.tags and ("html", "lang", "en") in parsed.named
    assert len(parsed.ids) == len(set(parsed.ids))
    labelled = {value for _, name, value in parsed.named if name in ("aria-labelledby", "for")}
    assert labelled <= set(parsed.ids)
    inputs = [value for tag, name, value in parsed.named if tag in ("input", "select") and name == "id"]
    assert set(inputs) <= {value for tag, name, value in parsed.named if (tag, name) == ("label", "for")}
    tables = [value for tag, name, value in parsed.named if (tag, name) == ("table", "id")]
    named = [value for tag, name, value in parsed.named if (tag, name) == ("table", "aria-labelledby")]
    assert len(tables) == len(named) == 9
