"""The seam between the API and the cluster behind it."""

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from prfaas.flows.ports import TokenBatch
from prfaas.flows.story import Story
from prfaas.request import Request, RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """A model that some live worker serves. `created` is in Unix seconds, `capabilities` are what all workers can that
    decode it."""

    id: str
    created: int
    max_context_tokens: int
    eos_token_ids: tuple[int, ...] = ()
    capabilities: frozenset[str] = frozenset()


class Backend(Protocol):
    """The cluster as the API sees it."""

    def models(self) -> Sequence[ModelCard]:
        """Models that can be served now."""
        ...

    def was_served(self, model: str) -> bool:
        """Not long ago, and may be again: nobody who decodes it is there, or all of them drain."""
        ...

    def obstacle(self) -> str | None:
        """Why nothing more can be served now; None when something can."""
        ...

    def complete(self, request: Request, story: Story) -> AsyncGenerator[TokenBatch, None]:
        """The tokens of the answer; the last batch has `finish`. `story` is told what happens, also after a failure.
        Closing the generator cancels everything upstream. Raises the kinds of PrfaasError."""
        ...

    def divert(self, story: Story, take: Callable[[bytes, float], bool]) -> None:
        """From now on tokens of this completion that nothing else comes with may be offered to `take`, packed, in the
        call that brings them, with the monotonic time. Those that it does not take, and some besides, come out of
        `complete`."""
        ...

    def new_request_id(self) -> RequestId: ...

    def metrics_text(self) -> bytes:
        """The metrics of this process in the Prometheus text format."""
        ...
