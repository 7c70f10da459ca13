"""Errors as the OpenAI API words them: one object, never nested."""

import math
from http import HTTPStatus
from typing import Any

import msgspec

from services.router.http.messages import Headers, Response

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable",
    504: "timeout_error",
}
#: Told with each 503 that knows no better.
RETRY_S = 1.0


def error_object(status: int, message: str, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    error_type = TYPES.get(status, "invalid_request_error")
    return {"error": {"message": message, "type": error_type, "param": param, "code": code}}


def error_response(
    status: int,
    message: str,
    *,
    param: str | None = None,
    code: str | None = None,
    retry_after_s: float | None = None,
    headers: Headers = (),
) -> Response:
    if retry_after_s is None and status == HTTPStatus.SERVICE_UNAVAILABLE:
        retry_after_s = RETRY_S
    if retry_after_s is not None:
        headers = (*headers, ("retry-after", str(max(1, math.ceil(retry_after_s)))))
    body = msgspec.json.encode(error_object(status, message, param=param, code=code))
    return Response(status, body, headers=headers)
