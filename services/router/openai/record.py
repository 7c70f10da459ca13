"""What the API tells about each request it has finished, for metrics and the log line."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from prfaas.flows.story import Story
from prfaas.observe.tracing import Span
from prfaas.request import FinishReason, Request, RequestId, TtftAccount


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
    #: W3C trace context: of its span where this router traces, else the client's own, if it is a valid one.
    traceparent: str | None = None
    #: Under way where this router traces.
    span: Span | None = None
    status: int = 0
    #: Class name of the error that ended it; in a stream the status is still 200.
    error: str | None = None
    #: From the request's last byte parsed to its end.
    duration_s: float = 0.0
    #: Whose key it came with; empty on an open endpoint, and for who has none.
    tenant: str = ""
    model: str | None = None
    stream: bool = False
    finish: FinishReason | None = None
    prompt_tokens: int | None = None
    output_tokens: int = 0
    queue_s: float | None = None
    tokenize_s: float | None = None
    #: When the last of these two ended, on the clock of `HttpRequest.received_s`; at first when the request came.
    lap_s: float = 0.0
    ttft_s: float | None = None
    #: Of the sequence whose first token was the first.
    account: TtftAccount | None = None
    #: The sequences, once the prompts are tokens.
    requests: Sequence[Request] = ()
    #: Path, reason, attempts and the rest of the TTFT terms.
    story: Story | None = None
    #: Those of the other sequences, where the request has several. The story above is the first one's.
    siblings: tuple[Story, ...] = ()

    def waited(self, now_s: float) -> None:
        """The time since the last lap was a wait."""
        self.queue_s, self.lap_s = (self.queue_s or 0.0) + now_s - self.lap_s, now_s

    def tokenized(self, now_s: float) -> None:
        """The time since the last lap went into reading the body and making tokens of it."""
        self.tokenize_s, self.lap_s = (self.tokenize_s or 0.0) + now_s - self.lap_s, now_s

    @property
    def stories(self) -> tuple[Story, ...]:
        return () if self.story is None else (self.story, *self.siblings)

    def failed(self, error: Exception) -> None:
        self.error = type(error).__name__


Observe = Callable[[RequestLog], None]
