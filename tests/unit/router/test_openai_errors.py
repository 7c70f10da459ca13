"""The table from errors to HTTP."""

import json

import pytest

from prfaas import errors
from prfaas.errors import PrfaasError
from services.router.openai.errors import to_object, to_response

TABLE = [
    (errors.InvalidRequest("m", param="p", code="c"), 400, "invalid_request_error"),
    (errors.ModelNotFound("m"), 404, "invalid_request_error"),
    (errors.Overloaded("kv bytes"), 503, "service_unavailable"),
    (errors.Overloaded("tenant rate"), 429, "rate_limit_error"),
    (errors.PeerUnavailable("d0", "gone"), 503, "service_unavailable"),
    (errors.TransferFailed("a", "reset"), 503, "service_unavailable"),
    (errors.EngineFailed("d0", "oom"), 503, "service_unavailable"),
    (errors.DeadlineExceeded("reserve", 1.0), 504, "timeout_error"),
    (errors.DeadlineOutOfReach("first token", 1.0), 504, "timeout_error"),
    (errors.NoProgress("decode", 1.0), 504, "timeout_error"),
    (errors.PrefillOverdue("prefill", 1.0), 504, "timeout_error"),
    (errors.NotAuthenticated("m"), 401, "authentication_error"),
    (errors.NotPermitted("m"), 403, "permission_error"),
    (errors.NamespaceMismatch("a", "b"), 503, "service_unavailable"),
    (errors.Stopping("the router"), 503, "service_unavailable"),
    (ValueError("secret detail"), 500, "server_error"),
]


@pytest.mark.parametrize(("error", "status", "kind"), TABLE)
def test_each_error_has_its_status(error: Exception, status: int, kind: str):
    """In OpenAI's shape, the same in a response and in a stream."""
    response = to_response(error)
    assert response.status == status
    body = json.loads(response.body)
    assert body == to_object(error)
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["type"] == kind


def test_the_table_knows_every_error():
    """A new kind of error needs a status. ConfigError ends the process and StaleEpoch is a plan's: neither meets a
    request."""
    kinds = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, PrfaasError)}
    assert kinds - {type(error) for error, _, _ in TABLE} == {
        PrfaasError,
        errors.ConfigError,
        errors.StaleEpoch,
    }


def test_the_client_is_told_when_to_come_back():
    """In whole seconds, at least one, for what a retry may help against."""
    assert dict(to_response(errors.Overloaded("kv", retry_after_s=2.1)).headers)["retry-after"] == "3"
    assert dict(to_response(errors.Overloaded("kv", retry_after_s=0.0)).headers)["retry-after"] == "1"
    assert dict(to_response(errors.PeerUnavailable("d", "x")).headers)["retry-after"] == "1"
    assert "retry-after" not in dict(to_response(errors.ModelNotFound("m")).headers)


def test_our_own_faults_are_not_explained_to_clients():
    """They are in the log."""
    assert b"secret" not in to_response(ValueError("secret detail")).body


def test_the_clients_faults_name_the_parameter():
    """With a code where OpenAI has one."""
    assert to_object(errors.ModelNotFound("m"))["error"] | {"message": ""} == {
        "message": "", "type": "invalid_request_error", "param": "model", "code": "model_not_found",
    }  # fmt: skip
