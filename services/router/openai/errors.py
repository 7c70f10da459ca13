"""The one table from errors to HTTP."""

from typing import Any

import structlog

from prfaas.errors import (
    DeadlineExceeded,
    EngineFailed,
    InvalidRequest,
    ModelNotFound,
    NamespaceMismatch,
    NotAuthenticated,
    NotPermitted,
    Overloaded,
    PeerUnavailable,
    Stopping,
    TransferFailed,
)
from services.router.http.errors import error_object, error_response
from services.router.http.messages import Response

log = structlog.get_logger(__name__)

#: Logged and counted for a client that left; never sent.
CLIENT_CLOSED_REQUEST = 499

#: Resources that belong to one tenant, which is asked to slow down (429). Others are room of the cluster's (503).
TENANT_RESOURCES = "tenant"


def status_of(error: BaseException) -> int:
    match error:
        case ModelNotFound():
            return 404
        case InvalidRequest():
            return 400
        case NotAuthenticated():
            return 401
        case NotPermitted():
            return 403
        case Overloaded(resource=resource):
            return 429 if resource.startswith(TENANT_RESOURCES) else 503
        case PeerUnavailable() | TransferFailed() | EngineFailed() | NamespaceMismatch() | Stopping():
            return 503
        case DeadlineExceeded():
            return 504
        case _:
            return 500


def to_response(error: Exception) -> Response:
    """Before the first byte."""
    status = status_of(error)
    retry_after_s = error.retry_after_s if isinstance(error, Overloaded) else None
    param, code = _place(error)
    headers = (("www-authenticate", "Bearer"),) if status == 401 else ()
    return error_response(status, _message(error), param=param, code=code, retry_after_s=retry_after_s, headers=headers)


def to_object(error: Exception) -> dict[str, Any]:
    """After the first byte: the same error inside the stream."""
    param, code = _place(error)
    return error_object(status_of(error), _message(error), param=param, code=code)


def log_unexpected(error: Exception, request_id: str) -> None:
    """What the client is not told."""
    if status_of(error) == 500:
        log.error("request_failed", request_id=request_id, exc_info=error)


def _place(error: Exception) -> tuple[str | None, str | None]:
    return (error.param, error.code) if isinstance(error, InvalidRequest) else (None, None)


def _message(error: Exception) -> str:
    """What went wrong, unless it is our own fault: that is for the log, not for the client."""
    return "Internal error" if status_of(error) == 500 else str(error)
