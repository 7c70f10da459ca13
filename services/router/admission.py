"""Who may use this router, and when: API keys in front of the pure machine, and the waits for it.

What must hold: a request that leaves, at whatever await, leaves nothing behind in the machine; no wait is longer than
the machine's `max_wait_s`.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

from prfaas.errors import (
    DeadlineExceeded,
    DeadlineOutOfReach,
    InvalidRequest,
    NotAuthenticated,
    NotPermitted,
    Overloaded,
    PrfaasError,
)
from prfaas.request import Request
from prfaas.scheduling.admission import RETRY_S, Admission, Ask, Limit, Refused, Turned
from prfaas.scheduling.turns import Priority, Ticket
from services.router.admission_keys import LiveKeys
from services.router.admission_port import Caller

DEADLINE = "x-prfaas-ttft-deadline-ms"
PRIORITY = "x-prfaas-priority"
FIRST_TOKEN = "time to first token"
#: About a week: more is no deadline.
_LONGEST_MS = 1e9

#: Expected time to the first token if it was sent now; None when it is not known.
Predict = Callable[[Request], Awaitable[float | None]]


class Observer(Protocol):
    def admitted(self, tenant: str, waited_s: float) -> None: ...

    def refused(self, tenant: str, reason: str) -> None:
        """`reason` is a Limit's value, or `key` or `model` when it was not about room."""
        ...


class Grant:
    def __init__(self, waited_s: float) -> None:
        self.waited_s, self.output_tokens = waited_s, 0

    def produced(self, tokens: int) -> None:
        self.output_tokens += tokens


class Gate:
    """Without keys everybody is the tenant "" without limits. `parts` is the number of live routers, `places` how many
    sequences the workers take on at once, None when that is not known."""

    def __init__(
        self,
        machine: Admission,
        keys: LiveKeys | None,
        observer: Observer,
        predict: Predict,
        now: Callable[[], float],
        parts: Callable[[], int],
        places: Callable[[], int | None],
    ) -> None:
        self._machine, self._keys, self._observer = machine, keys, observer
        self._predict, self._now, self._parts, self._places = predict, now, parts, places
        self._turns: dict[Ticket, asyncio.Future[Refused | None]] = {}

    @property
    def needs_key(self) -> bool:
        return self._keys is not None

    def caller(self, headers: Mapping[str, str]) -> Caller:
        asked_s, asked_priority = _deadline_s(headers), _priority(headers)
        if self._keys is None:
            return Caller(ttft_deadline_s=asked_s, priority=_lower(Priority.NORMAL, asked_priority))
        found = self._keys.current.find(_key(headers))
        if found is None:
            self._observer.refused("", "key")
            given = headers.get("authorization", "").partition(" ")[2]
            raise NotAuthenticated(
                "The API key is not known" if given else "An API key is needed: Authorization: Bearer"
            )
        key_id, record, tenant = found
        default_s = None if tenant.ttft_deadline_ms is None else tenant.ttft_deadline_ms / 1000
        return Caller(
            tenant=record.tenant,
            key_id=key_id,
            models=None if record.models is None else frozenset(record.models),
            quota=tenant.quota(max(1, self._parts())),
            priority=_lower(tenant.priority, asked_priority),
            ttft_deadline_s=default_s if asked_s is None else asked_s,
        )

    def known(self, headers: Mapping[str, str]) -> bool:
        return self._keys is None or self._keys.current.find(_key(headers)) is not None

    def check_model(self, caller: Caller, model: str) -> None:
        if not caller.may_use(model):
            self._observer.refused(caller.tenant, "model")
            raise NotPermitted(f"The API key is not good for the model {model!r}")

    def check_limits(self, caller: Caller) -> None:
        ask = Ask(tenant=caller.tenant, quota=caller.quota, tokens=1)
        if (refused := self._machine.own_limit(ask, self._now())) is not None:
            raise self._error(caller, refused, 0.0)

    @asynccontextmanager
    async def admitted(self, caller: Caller, requests: Sequence[Request], received_s: float) -> AsyncIterator[Grant]:
        prompt_tokens = sum(request.prompt_tokens for request in requests)
        ask = Ask(
            tenant=caller.tenant,
            quota=caller.quota,
            tokens=prompt_tokens + sum(request.sampling.max_tokens for request in requests),
            sequences=len(requests),
            priority=caller.priority,
            patience_s=await self._patience_s(caller, requests[0], received_s),
        )
        begun_s = self._now()
        ticket = await self._turn(caller, ask, received_s)
        grant = Grant(self._now() - begun_s)
        self._observer.admitted(caller.tenant, grant.waited_s)
        used_tokens = prompt_tokens
        try:
            yield grant
        except PrfaasError:
            used_tokens = prompt_tokens if grant.output_tokens else 0  # it got nothing for its money
            raise
        finally:
            self._machine.finish(ticket, used_tokens + grant.output_tokens, self._now())
            self._move()

    async def _patience_s(self, caller: Caller, request: Request, received_s: float) -> float | None:
        """How long it may wait so that the workers can keep the deadline."""
        if caller.ttft_deadline_s is None:
            return None
        predicted_s = await self._predict(request)
        return caller.ttft_deadline_s - (self._now() - received_s) - (predicted_s or 0.0)

    async def _turn(self, caller: Caller, ask: Ask, received_s: float) -> Ticket:
        """Its ticket once it runs. Whatever ends the wait before, the machine knows nothing of it afterwards, also when
        it had just been let in."""
        self._count_places()
        ticket = self._machine.arrive(ask, self._now())
        if isinstance(ticket, Refused):
            raise self._error(caller, ticket, received_s)
        turn = self._turns[ticket] = asyncio.get_running_loop().create_future()
        try:
            self._move()
            refused = turn.result() if turn.done() else await self._wait(turn, ask)
            if refused is not None:
                raise self._error(caller, refused, received_s)
        except BaseException:
            self._machine.withdraw(ticket)
            self._move()
            raise
        finally:
            del self._turns[ticket]
        return ticket

    async def _wait(self, turn: asyncio.Future[Refused | None], ask: Ask) -> Refused | None:
        longest_s, patience_s = self._machine.params.max_wait_s, ask.patience_s
        impatient = patience_s is not None and patience_s < longest_s
        limit = asyncio.timeout(patience_s if impatient else longest_s)
        try:
            async with limit:
                return await turn
        except TimeoutError:
            if not limit.expired():
                raise
            why = Limit.DEADLINE if impatient else Limit.WAIT
            return Refused(why, self._machine.retry_s(self._now()))

    def _count_places(self) -> None:
        """This router's part of them: more would only be refused there."""
        places = self._places()
        self._machine.places = None if places is None else max(1, places // max(1, self._parts()))

    def _move(self) -> None:
        self._count_places()
        for move in self._machine.moves(self._now()):
            turn = self._turns.get(move.ticket)
            if turn is not None and not turn.done():
                turn.set_result(move.refused if isinstance(move, Turned) else None)

    def _error(self, caller: Caller, refused: Refused, received_s: float) -> PrfaasError:
        self._observer.refused(caller.tenant, refused.limit.value)
        retry_s = RETRY_S if refused.retry_after_s is None else refused.retry_after_s
        match refused.limit:
            case Limit.SIZE:
                return InvalidRequest("The request is larger than this key's limits ever allow", code="over_limit")
            case Limit.REQUESTS | Limit.TOKENS:
                return Overloaded(f"tenant's {refused.limit.value} per minute are used up", retry_after_s=retry_s)
            case Limit.CONCURRENCY:
                return Overloaded("tenant's requests at once are used up", retry_after_s=retry_s)
            case Limit.QUEUE | Limit.SHARE | Limit.WAIT:
                return Overloaded(f"the queue ({refused.limit.value})", retry_after_s=retry_s)
            case Limit.DEADLINE:
                deadline_s = caller.ttft_deadline_s or 0.0
                late = self._now() - received_s >= deadline_s
                return (DeadlineExceeded if late else DeadlineOutOfReach)(FIRST_TOKEN, deadline_s)


def _key(headers: Mapping[str, str]) -> str:
    """Empty when there is none."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _deadline_s(headers: Mapping[str, str]) -> float | None:
    if (given := headers.get(DEADLINE)) is None:
        return None
    if not (given.isascii() and given.isdigit() and len(given) < 12 and 0 < int(given) <= _LONGEST_MS):
        raise InvalidRequest(f"{DEADLINE} must be a whole number of milliseconds, at least 1", param=DEADLINE)
    return int(given) / 1000


def _lower(own: Priority, asked: Priority | None) -> Priority:
    return own if asked is None else max(own, asked, key=lambda each: each.rank)


def _priority(headers: Mapping[str, str]) -> Priority | None:
    """What the caller asks for: no better than its key allows."""
    if (given := headers.get(PRIORITY)) is None:
        return None
    try:
        return Priority(given)
    except ValueError:
        known = ", ".join(each.value for each in Priority)
        raise InvalidRequest(f"{PRIORITY} must be one of {known}", param=PRIORITY) from None
