"""The seam between the API and who may use it, and when."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from prfaas.request import Request
from prfaas.scheduling.allowance import UNLIMITED, Quota
from prfaas.scheduling.turns import Priority


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who asks, as the key says, and what came with the request. `models` is None when the key is good for all;
    `ttft_deadline_s` counts from the request's arrival."""

    tenant: str = ""
    key_id: str = ""
    models: frozenset[str] | None = None
    quota: Quota = UNLIMITED
    priority: Priority = Priority.NORMAL
    ttft_deadline_s: float | None = None

    def may_use(self, model: str) -> bool:
        return self.models is None or model in self.models


class Grant(Protocol):
    """The right to run. What was charged and not used by its end is given back."""

    #: How long it took to get it.
    waited_s: float

    def produced(self, tokens: int) -> None: ...


class AdmissionPort(Protocol):
    @property
    def needs_key(self) -> bool:
        """Whether nobody is let in without an API key."""
        ...

    def caller(self, headers: Mapping[str, str]) -> Caller:
        """Raises NotAuthenticated, InvalidRequest."""
        ...

    def known(self, headers: Mapping[str, str]) -> bool:
        """Whether `caller` finds out who it is."""
        ...

    def check_model(self, caller: Caller, model: str) -> None:
        """Raises NotPermitted."""
        ...

    def check_limits(self, caller: Caller) -> None:
        """Before there is work with a request: whether the caller's own limits refuse any. Raises Overloaded."""
        ...

    def admitted(
        self, caller: Caller, requests: Sequence[Request], received_s: float
    ) -> AbstractAsyncContextManager[Grant]:
        """Entered when it is the turn of these sequences, which are one request of the caller's. Raises Overloaded,
        DeadlineExceeded, InvalidRequest. Leaving waits for nothing."""
        ...
