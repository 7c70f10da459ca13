"""The admin API: what an operator may see and change, on a port of its own and with a key of its own.

Whatever it changes it writes into the store, where every router and worker reads it; nothing is done to this process
alone. A flip is a plan like the leader's: it has an epoch, and the slow loop may change the node again after its dwell.
The live page is beside it, at the root, and needs no key itself.
"""

import hmac
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote

import msgspec

from prfaas.errors import InvalidRequest, PeerUnavailable, StaleEpoch
from services.router.http.errors import error_response
from services.router.http.messages import HttpRequest, Response
from services.router.live_page.page import TOLD_NOW, page
from services.router.live_page.state import LiveState, Shown
from services.router.operator import Drain, Flip, Operator, Pin

PREFIX = "/admin/v1/"


class AdminApi:
    def __init__(self, operator: Operator, key: str, live: LiveState) -> None:
        assert key, "an admin API has a key"
        self._operator, self._key, self._live = operator, key.encode(), live

    async def handle(self, http: HttpRequest) -> Response:
        if (http.method, http.path) == ("GET", "/"):
            return page()
        if not self._authorized(http):
            return error_response(401, "The admin key is missing or wrong", headers=(("www-authenticate", "Bearer"),))
        parts = tuple(unquote(part) for part in http.path.removeprefix(PREFIX).split("/"))
        if not http.path.startswith(PREFIX):
            return error_response(404, f"There is no {http.path[:200]}", code="not_found")
        try:
            return await self._answer(http, parts)
        except (InvalidRequest, msgspec.MsgspecError) as error:
            missing = isinstance(error, InvalidRequest) and error.code == "not_found"
            return error_response(404 if missing else 400, str(error), code="not_found" if missing else None)
        except StaleEpoch as error:
            return error_response(409, str(error), code="stale_epoch")
        except PeerUnavailable as error:
            return error_response(503, str(error), retry_after_s=1.0)

    def _authorized(self, http: HttpRequest) -> bool:
        scheme, _, given = http.headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), self._key)

    async def _answer(self, http: HttpRequest, parts: tuple[str, ...]) -> Response:
        operator = self._operator
        match http.method, parts:
            case "GET", ("workers",):
                return _json(operator.workers())
            case "POST", ("workers", node, "flip"):
                return _json(await operator.flip(node, msgspec.json.decode(http.body, type=Flip)))
            case "POST", ("workers", node, "drain"):
                return _json(await operator.drain(node, msgspec.json.decode(http.body or b"{}", type=Drain)))
            case "DELETE", ("workers", node, "drain"):
                return _json(await operator.undrain(node))
            case "GET", ("threshold",):
                return _json(operator.threshold())
            case "PUT", ("threshold",):
                return _json(await operator.pin(msgspec.json.decode(http.body, type=Pin)))
            case "DELETE", ("threshold",):
                return _json(await operator.unpin())
            case "GET", ("scheduler",):
                return _json(operator.scheduler())
            case "GET", ("live",):
                return _json(self._live.state(Shown()))
            case "POST", ("live",):
                return _json(self._live.state(msgspec.json.decode(http.body, type=Shown)))
            case "GET", ("explain", request_id):
                return _json(operator.explain(request_id))
            case _:
                return error_response(404, f"There is no {http.method} {http.path[:200]}", code="not_found")


def _json(value: Any) -> Response:
    return Response(HTTPStatus.OK, msgspec.json.encode(value), headers=TOLD_NOW)
