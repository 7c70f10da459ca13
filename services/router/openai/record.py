"""What the API tells about each request it has finished, for metrics and the log line."""

from collections.abc import Callable
from dataclasses import dataclass

from prfaas.flows.story import Story
from prfaas.request import FinishReason, RequestId


@dataclass(slots=True)
class RequestLog:
    """One HTTP request. Handed to `observe` once, when its last byte is written or its client has left (499).

    `route` is a bounded name, never the path that was asked for. Fields of a completion stay None for other requests
    and as long as the request did not get there.
    """

    route: str = "unknown"
    request_id: str = ""
    #: Our own id of the completion, if it came to one.
    completion_id: RequestId | None = None
    traceparent: str | None = None
    status: int = 0
    #: Class name of the error that ended it; in a stream the status is still 200.
    error: str | None = None
    #: From the request's last byte parsed to its end.
    duration_s: float = 0.0
    model: str | None = None
    stream: bool = False
    finish: FinishReason | None = None
    prompt_tokens: int | None = None
    output_tokens: int = 0
    queue_s: float | None = None
    tokenize_s: float | None = None
    ttft_s: float | None = None
    #: Path, reason, attempts and the rest of the TTFT terms.
    story: Story | None = None

    def failed(self, error: Exception) -> None:
        self.error = type(error).__name__


Observe = Callable[[RequestLog], None]
