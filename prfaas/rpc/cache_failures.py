"""Our errors as a shard of the cache answers with them: a gRPC status, and the facts beside it as trailing metadata."""

import grpc
from google.protobuf.message import DecodeError

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
from prfaas.rpc.failures import pack_failure, unpack_failure
from prfaas.rpc.v1 import worker_pb2

METADATA_KEY = "prfaas-failure-bin"

_CODES: dict[type[PrfaasError], grpc.StatusCode] = {
    InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    PeerUnavailable: grpc.StatusCode.UNAVAILABLE,
    TransferFailed: grpc.StatusCode.ABORTED,
    EngineFailed: grpc.StatusCode.INTERNAL,
    DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    NamespaceMismatch: grpc.StatusCode.FAILED_PRECONDITION,
}


def status_of(error: PrfaasError) -> tuple[grpc.StatusCode, str, tuple[tuple[str, bytes], ...]]:
    """What a servicer aborts a call with: `await context.abort(*status_of(error))`."""
    code = next((code for kind, code in _CODES.items() if isinstance(error, kind)), grpc.StatusCode.UNKNOWN)
    return code, str(error), ((METADATA_KEY, pack_failure(error).SerializeToString()),)


def error_of(error: grpc.aio.AioRpcError, shard: NodeId, attempt: str = "") -> PrfaasError:
    """What a call of a shard has failed with. A shard that is not there or does not say why is PeerUnavailable."""
    for key, value in error.trailing_metadata() or ():
        if key == METADATA_KEY and isinstance(value, bytes):
            try:
                return unpack_failure(worker_pb2.Failed.FromString(value), AttemptId(attempt), shard)
            except DecodeError:
                break
    return PeerUnavailable(shard, error.details() or error.code().name)
