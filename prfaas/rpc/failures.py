"""Our errors as a worker reports them to a router, and back, with their facts.

A code that this version does not know becomes EngineFailed: the attempt has failed, and no more is understood of it.
"""

from math import ceil

from prfaas.cluster import NodeId
from prfaas.errors import (
    DeadlineExceeded,
    EngineFailed,
    InvalidRequest,
    NamespaceMismatch,
    Overloaded,
    PeerUnavailable,
    PrfaasError,
    TransferFailed,
)
from prfaas.request import AttemptId
from prfaas.rpc.v1 import worker_pb2 as pb

MAX_MS = (1 << 32) - 1


def milliseconds(seconds: float) -> int:
    """What remains of a wait as it crosses the wire: never rounded down to nothing, never beyond uint32 (49 days).

    Whole milliseconds stay what they are: 2.023 s times 1000 is a little more than 2023 in floating point.
    """
    return MAX_MS if seconds >= MAX_MS / 1000 else max(0, ceil(round(seconds * 1000, 6)))


def pack_failure(error: PrfaasError) -> pb.Failed:
    match error:
        case InvalidRequest():
            return pb.Failed(
                code="invalid_request", detail=error.message, param=error.param or "", subject=error.code or ""
            )
        case Overloaded():
            retry_after_ms = milliseconds(error.retry_after_s)
            return pb.Failed(code="overloaded", detail=error.resource, retry_after_ms=retry_after_ms)
        case PeerUnavailable():
            return pb.Failed(code="peer_unavailable", detail=error.detail, subject=error.peer)
        case TransferFailed():
            return pb.Failed(code="transfer_failed", detail=error.detail, subject=error.cause)
        case EngineFailed():
            return pb.Failed(code="engine_failed", detail=error.detail, subject=error.node)
        case DeadlineExceeded():
            return pb.Failed(code="deadline", subject=error.stage, waited_ms=milliseconds(error.seconds))
        case NamespaceMismatch():
            return pb.Failed(code="namespace", detail=error.theirs, subject=error.ours)
        case _:
            raise AssertionError(f"a worker does not answer with {error!r}")


def unpack_failure(message: pb.Failed, attempt: AttemptId, worker: NodeId) -> PrfaasError:
    match message.code:
        case "invalid_request":
            return InvalidRequest(message.detail, param=message.param or None, code=message.subject or None)
        case "overloaded":
            return Overloaded(message.detail, retry_after_s=message.retry_after_ms / 1000)
        case "peer_unavailable":
            return PeerUnavailable(message.subject, message.detail)
        case "transfer_failed":
            return TransferFailed(attempt, message.subject, message.detail)
        case "engine_failed":
            return EngineFailed(message.subject, message.detail)
        case "deadline":
            return DeadlineExceeded(message.subject, message.waited_ms / 1000)
        case "namespace":
            return NamespaceMismatch(message.subject, message.detail)
        case unknown:
            return EngineFailed(worker, f"{unknown}: {message.detail}")
