"""The errors that cross module borders, as a small tree.

Each carries its facts as fields. Adapters turn foreign exceptions into these; `services/` turns these into HTTP and
gRPC codes in one table.
"""

from typing import TypeVar

E = TypeVar("E", bound=BaseException)


class PrfaasError(Exception):
    """Base of all errors that prfaas raises on purpose."""


class InvalidRequest(PrfaasError):
    """The caller's request cannot be served as written; repeating it will not help."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message, self.param, self.code = message, param, code


class ModelNotFound(InvalidRequest):
    """No live worker serves the model that was asked for."""

    def __init__(self, model: str) -> None:
        super().__init__(f"The model {model!r} does not exist", param="model", code="model_not_found")
        self.model = model


#: `Overloaded.resource` of a node whose pool has no span for KV that would come from elsewhere.
KV_ROOM = "room for KV"


class Overloaded(PrfaasError):
    """There is no room now; the same request may succeed after `retry_after_s` seconds."""

    def __init__(self, resource: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(f"no room: {resource}")
        self.resource, self.retry_after_s = resource, retry_after_s


class PeerUnavailable(PrfaasError):
    """A worker, the store or a link cannot be reached, or broke while it was being used."""

    def __init__(self, peer: str, detail: str) -> None:
        super().__init__(f"{peer} is unavailable: {detail}")
        self.peer, self.detail = peer, detail


class Stopping(PrfaasError):
    """This process ends, and what it does for others with it. Nobody else has failed; the same request may be served
    elsewhere."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what} is stopping")
        self.what = what


#: `TransferFailed.cause` of a decode node that lost what the cache was to bring; the node itself is well.
CACHE_LOST = "cache"


class TransferFailed(PrfaasError):
    """The KV of one attempt did not arrive complete and checked. `cause` is the first root cause, one word. Whoever was
    to receive it has the first `boundary_tokens` tokens of it."""

    def __init__(self, attempt: str, cause: str, detail: str = "", boundary_tokens: int = 0) -> None:
        super().__init__(f"transfer {attempt} failed: {cause} {detail}".rstrip())
        self.attempt, self.cause, self.detail, self.boundary_tokens = attempt, cause, detail, boundary_tokens


class EngineFailed(PrfaasError):
    """The engine could not carry out a command it had accepted."""

    def __init__(self, node: str, detail: str) -> None:
        super().__init__(f"engine of {node} failed: {detail}")
        self.node, self.detail = node, detail


class DeadlineExceeded(PrfaasError):
    """A wait ended by its deadline. `stage` names what was waited for."""

    def __init__(self, stage: str, seconds: float) -> None:
        super().__init__(f"{stage} did not finish within {seconds:.3f} s")
        self.stage, self.seconds = stage, seconds


class DeadlineOutOfReach(DeadlineExceeded):
    """A deadline that has not passed, but that cannot be kept as things are."""

    def __init__(self, stage: str, seconds: float) -> None:
        super().__init__(stage, seconds)
        self.args = (f"{stage} cannot be had within {seconds:.3f} s",)


class NoProgress(DeadlineExceeded):
    """A request was ended that got nowhere, although none of its deadlines had."""

    def __init__(self, stage: str, seconds: float) -> None:
        super().__init__(stage, seconds)
        self.args = (f"no progress for {seconds:.1f} s in the stage {stage}",)


class PrefillOverdue(DeadlineExceeded):
    """A prefill elsewhere was given up while the decode node has just the time left to do it itself."""


class NotAuthenticated(PrfaasError):
    """The caller shows no key, or none that is known."""


class NotPermitted(PrfaasError):
    """The caller is known, and may not do this."""


class NamespaceMismatch(PrfaasError):
    """Two sides hold KV of different models or geometries and must not exchange any."""

    def __init__(self, ours: str, theirs: str) -> None:
        super().__init__(f"namespace mismatch: ours {ours}, theirs {theirs}")
        self.ours, self.theirs = ours, theirs


class StaleEpoch(PrfaasError):
    """A plan was made without knowledge of a later one: `seen` is its epoch, `current` the one in force."""

    def __init__(self, seen: int, current: int) -> None:
        super().__init__(f"a plan of epoch {seen} came after one of epoch {current}")
        self.seen, self.current = seen, current


class ConfigError(PrfaasError):
    """The configuration is wrong. `path` is the dotted name of the setting."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__(f"{path}: {message}")
        self.path, self.message = path, message


def first_of(group: BaseExceptionGroup[E]) -> E:
    """The first error that is none but a group of others."""
    first = group.exceptions[0]
    return first_of(first) if isinstance(first, BaseExceptionGroup) else first
