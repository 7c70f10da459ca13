"""The live page itself: one static HTML file, which any browser may have, because nothing is told in it. What it shows
it asks of the admin API with the operator's key.

Everything it needs is in the file. The policy that goes with it lets a browser run the file's own script and style, by
their digests, ask this router and nobody else, and never take text for markup.
"""

import hashlib
import re
from base64 import b64encode
from functools import cache
from http import HTTPStatus
from pathlib import Path

from services.router.http.messages import Headers, Response

FILE = Path(__file__).with_name("live.html")
#: Of all that the admin port tells: it is of this moment, and is what its content type says.
TOLD_NOW: Headers = (("cache-control", "no-store"), ("x-content-type-options", "nosniff"))


@cache
def page() -> Response:
    body = FILE.read_text(encoding="utf-8")
    headers = (
        ("content-security-policy", _policy(body)),
        ("referrer-policy", "no-referrer"),
        ("cross-origin-opener-policy", "same-origin"),
        *TOLD_NOW,
    )
    return Response(HTTPStatus.OK, body.encode(), "text/html; charset=utf-8", headers)


def _policy(body: str) -> str:
    return "; ".join(
        [
            "default-src 'none'",
            f"script-src {_digests(body, 'script')}",
            f"style-src {_digests(body, 'style')}",
            "img-src data:",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        ]
    )


def _digests(body: str, element: str) -> str:
    contents = re.findall(rf"<{element}>(.*?)</{element}>", body, re.DOTALL)
    digests = (b64encode(hashlib.sha256(content.encode()).digest()).decode() for content in contents)
    return " ".join(f"'sha256-{digest}'" for digest in digests)
