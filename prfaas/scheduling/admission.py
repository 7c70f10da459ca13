"""When a request that has come to this router may go to the workers: the bounds of one process, tenant by tenant and
for all of them.

A request is refused when it comes, for its tenant's own limits or because the queue is full, or it runs at once, or it
waits for its turn. What it was charged is given back when it leaves, whichever way. After every event `moves` says what
follows for those that wait. (What a worker takes on is `prfaas.node.admission`.)
"""

import math
from dataclasses import dataclass
from enum import Enum

from prfaas.scheduling.allowance import Account, Quota
from prfaas.scheduling.turns import Priority, Ticket, Turns, Waiting

#: Told when nothing is known yet of how fast requests are served.
RETRY_S = 1.0
#: Weight of the latest request in the mean time of service.
_LATEST = 0.1
_FEW_ACCOUNTS = 64
#: A shorter time of service says nothing.
_SHORTEST_S = 1e-6


class Limit(Enum):
    """What stood in the way. The first four are the tenant's own."""

    SIZE = "size"
    REQUESTS = "requests"
    TOKENS = "tokens"
    CONCURRENCY = "concurrency"
    #: No room to wait.
    QUEUE = "queue"
    #: It waited, and went for those whose tenant takes less or whose class is better.
    SHARE = "share"
    #: The wait is, or would be, too long.
    WAIT = "wait"
    DEADLINE = "deadline"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionParams:
    """`max_running` and `max_queued_requests` count sequences and requests; tokens are of prompts and what may be
    generated."""

    max_running: int
    max_running_tokens: int | None = None
    max_queued_requests: int = 256
    max_queued_tokens: int = 4 << 20
    max_wait_s: float = 30.0
    ageing_s: float = 5.0
    quantum_tokens: int = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """`patience_s`: its turn must come within, or the time to its first token is missed."""

    tenant: str
    quota: Quota
    tokens: int
    sequences: int = 1
    priority: Priority = Priority.NORMAL
    patience_s: float | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    """`retry_after_s` is None where it makes no sense to come back."""

    limit: Limit
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Go:
    """It is the turn of this one, which runs from now on."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class Turned:
    """This one waits no longer and is gone."""

    ticket: Ticket
    refused: Refused


@dataclass(slots=True, kw_only=True)
class Use:
    """What one tenant has here now, in sequences and tokens, and of its rates what this router's part leaves it. None:
    no limit of its own."""

    weight: float
    max_concurrent: int | None
    requests_per_min: float | None
    requests_left: float | None
    tokens_per_min: float | None
    tokens_left: float | None
    running: int = 0
    running_tokens: int = 0
    waiting: int = 0
    waiting_tokens: int = 0

    @classmethod
    def of(cls, account: Account, now: float) -> "Use":
        quota = account.quota
        return cls(
            weight=quota.weight,
            max_concurrent=quota.max_concurrent,
            requests_per_min=quota.requests_per_min,
            requests_left=account.requests.refilled(now) if account.requests is not None else None,
            tokens_per_min=quota.tokens_per_min,
            tokens_left=account.tokens.refilled(now) if account.tokens is not None else None,
        )


@dataclass(frozen=True, slots=True)
class _Running:
    tenant: str
    tokens: int
    sequences: int
    since_s: float


class Admission:
    def __init__(self, params: AdmissionParams) -> None:
        self.params = params
        self.turns = Turns(params.ageing_s, params.quantum_tokens)
        self.running = self.running_tokens = 0
        self._places = params.max_running
        self._accounts: dict[str, Account] = {}
        self._accounts_kept = _FEW_ACCOUNTS
        self._running: dict[Ticket, _Running] = {}
        self._moves: list[Go | Turned] = []
        self._tickets = 0
        self._service_s: float | None = None

    def uses(self, now: float) -> dict[str, Use]:
        """By tenant, of those that were here lately."""
        uses = {name: Use.of(account, now) for name, account in self._accounts.items()}
        for one in self._running.values():
            use = uses[one.tenant]
            use.running += one.sequences
            use.running_tokens += one.tokens
        for waiting in self.turns.everybody():
            use = uses[waiting.tenant]
            use.waiting += waiting.sequences
            use.waiting_tokens += waiting.tokens
        return uses

    @property
    def places(self) -> int:
        """For sequences to run at once: what the workers have, within `max_running`."""
        return self._places

    @places.setter
    def places(self, places: int | None) -> None:
        """None: not known."""
        self._places = self.params.max_running if places is None else min(places, self.params.max_running)

    def own_limit(self, ask: Ask, now: float) -> Refused | None:
        """Which of the tenant's own limits would refuse this now. In this order: never, not so many at once, not so
        soon."""
        account, quota = self._account(ask, now), ask.quota
        whole, held = quota.max_concurrent or self.params.max_running, account.held + ask.sequences
        too_many = ask.sequences > min(self.params.max_running, whole)
        if too_many or (quota.tokens_per_min is not None and ask.tokens > quota.tokens_per_min):
            return Refused(Limit.SIZE)
        if quota.concurrent is not None and held > quota.concurrent and account.held:
            return Refused(Limit.CONCURRENCY, self._own_room_s(ask.tenant, held - quota.concurrent, now))
        buckets = ((Limit.REQUESTS, account.requests, 1), (Limit.TOKENS, account.tokens, ask.tokens))
        for limit, bucket, amount in buckets:
            if bucket is not None and (wait_s := bucket.wait_s(amount, now)) > 0:
                return Refused(limit, wait_s)
        return None

    def arrive(self, ask: Ask, now: float) -> Ticket | Refused:
        """Taken on, to wait until `moves` has its ticket; or refused, and nothing of it stays."""
        if (refused := self.own_limit(ask, now) or self._too_slow(ask, now)) is not None:
            return refused
        self._tickets += 1
        if not self.turns and self._fits(ask):
            self._accounts[ask.tenant].take(ask.tokens, ask.sequences)
            return self._start(Ticket(self._tickets), ask, now)
        newcomer = Waiting(
            ticket=Ticket(self._tickets),
            tenant=ask.tenant,
            tokens=ask.tokens,
            sequences=ask.sequences,
            priority=ask.priority,
            weight=ask.quota.weight,
            since_s=now,
        )
        if not self._make_room(newcomer, now):
            return Refused(Limit.QUEUE, self._room_s(ask.tokens, now))
        self._accounts[ask.tenant].take(ask.tokens, ask.sequences)
        self.turns.add(newcomer)
        return newcomer.ticket

    def moves(self, now: float) -> list[Go | Turned]:
        """Who goes now, and who has had to leave."""
        while (one := self.turns.take(self._fits, now)) is not None:
            self._start(one.ticket, one, now)
        moves, self._moves = self._moves, []
        return moves

    def withdraw(self, ticket: Ticket) -> None:
        """It leaves before anything was done for it, and is as if it had never come. Idempotent."""
        if ticket in self.turns:
            one: Waiting | _Running = self.turns.remove(ticket)
        elif ticket in self._running:
            one = self._stopped(ticket)
        else:
            return
        self._accounts[one.tenant].give_back(one.tokens, one.sequences, request=True)

    def finish(self, ticket: Ticket, used_tokens: int, now: float) -> None:
        """One that ran has ended, and did not need all it was charged for."""
        one = self._stopped(ticket)
        self._accounts[one.tenant].give_back(max(0, one.tokens - used_tokens), one.sequences, request=False)
        took_s = max(0.0, now - one.since_s)
        self._service_s = took_s if self._service_s is None else self._service_s + _LATEST * (took_s - self._service_s)

    def retry_s(self, now: float) -> float:
        """About how long until all that wait now have had their turn."""
        rate = self._per_s(now)
        return RETRY_S if rate is None else (self.turns.sequences + 1) / rate

    def check(self) -> None:
        self.turns.check()
        params = self.params
        assert self.running == sum(one.sequences for one in self._running.values()) <= params.max_running
        assert self.running_tokens == sum(one.tokens for one in self._running.values())
        assert self.running_tokens <= (params.max_running_tokens or math.inf) or len(self._running) == 1
        assert len(self.turns) <= params.max_queued_requests
        assert self.turns.tokens <= params.max_queued_tokens or len(self.turns) == 1
        held: dict[str, int] = {}
        everybody: list[_Running | Waiting] = [*self._running.values(), *self.turns.everybody()]
        for one in everybody:
            held[one.tenant] = held.get(one.tenant, 0) + one.sequences
        for tenant, account in self._accounts.items():
            account.check()
            assert account.held == held.pop(tenant, 0)
        assert not held

    def _too_slow(self, ask: Ask, now: float) -> Refused | None:
        """It would be in vain to let it wait."""
        wait_s = self._wait_s(ask, now)
        if ask.patience_s is not None and (ask.patience_s <= 0 or wait_s > ask.patience_s):
            return Refused(Limit.DEADLINE)
        return Refused(Limit.WAIT, wait_s - self.params.max_wait_s) if wait_s > self.params.max_wait_s else None

    def _wait_s(self, ask: Ask, now: float) -> float:
        """How long it would wait, about; 0 also when that cannot be told."""
        if not self.turns and self.running + ask.sequences <= self._places:
            return 0.0
        rate = self._per_s(now)
        ahead = self.turns.ahead(ask.tenant, ask.quota.weight, ask.priority, now)
        return 0.0 if rate is None else (ahead + ask.sequences) / rate

    def _make_room(self, newcomer: Waiting, now: float) -> bool:
        """Whether the queue has room, perhaps because others give way."""
        requests = len(self.turns) + 1 - self.params.max_queued_requests
        tokens = self.turns.tokens + newcomer.tokens - self.params.max_queued_tokens
        if requests <= 0 and (tokens <= 0 or not self.turns):  # any one prompt may wait
            return True
        leaving = self.turns.give_way(newcomer, requests, tokens, now)
        for one in leaving:
            self.withdraw(one.ticket)
            self._moves.append(Turned(one.ticket, Refused(Limit.SHARE, self.retry_s(now))))
        return bool(leaving)

    def _room_s(self, tokens: int, now: float) -> float:
        """How long until the queue, as it drains, has room for so many tokens."""
        rate = self._per_s(now)
        if rate is None or not self.turns:
            return RETRY_S
        tokens_each = self.turns.tokens / self.turns.sequences
        over = self.turns.tokens + tokens - self.params.max_queued_tokens
        return max(1.0, over / tokens_each) / rate

    def _own_room_s(self, tenant: str, sequences: int, now: float) -> float:
        rate = self._per_s(now)
        own = sum(one.sequences for one in self._running.values() if one.tenant == tenant)
        return RETRY_S if rate is None or not own else sequences / (rate * own / self.running)

    def _per_s(self, now: float) -> float | None:
        """Sequences that end per second: as many as run, in the mean time one takes; of the first of all it is known
        how long it has taken so far."""
        oldest_s = now - next(iter(self._running.values())).since_s if self._running else 0.0
        service_s = oldest_s if self._service_s is None else self._service_s
        return self.running / service_s if self.running and service_s > _SHORTEST_S else None

    def _start(self, ticket: Ticket, one: Ask | Waiting, now: float) -> Ticket:
        self._running[ticket] = _Running(one.tenant, one.tokens, one.sequences, now)
        self.running += one.sequences
        self.running_tokens += one.tokens
        self._moves.append(Go(ticket))
        return ticket

    def _stopped(self, ticket: Ticket) -> _Running:
        one = self._running.pop(ticket)
        self.running -= one.sequences
        self.running_tokens -= one.tokens
        return one

    def _fits(self, one: Ask | Waiting) -> bool:
        """What is alone may be more than there is room for: the workers judge it."""
        room = self.params.max_running_tokens
        if not self._running:
            return one.sequences <= self.params.max_running
        fits = room is None or self.running_tokens + one.tokens <= room
        return fits and self.running + one.sequences <= self._places

    def _account(self, ask: Ask, now: float) -> Account:
        account = self._accounts.get(ask.tenant)
        if account is None:
            self._forget(now)
            account = self._accounts[ask.tenant] = Account(ask.quota, now)
        account.follow(ask.quota, now)
        return account

    def _forget(self, now: float) -> None:
        """Tenants that have not been here for long; looked for when there are twice as many as were left last time."""
        if len(self._accounts) >= self._accounts_kept:
            self._accounts = {name: one for name, one in self._accounts.items() if not one.untouched(now)}
            self._accounts_kept = max(_FEW_ACCOUNTS, 2 * len(self._accounts))
