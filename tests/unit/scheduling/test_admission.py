"""Opposite `prfaas/scheduling/admission.py`."""

import math
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from prfaas.scheduling.admission import Admission, AdmissionParams, Ask, Go, Limit, Refused, Turned
from prfaas.scheduling.allowance import UNLIMITED, Quota
from prfaas.scheduling.turns import Priority, Ticket

PARAMS = AdmissionParams(max_running=2, max_queued_requests=4, max_queued_tokens=1000, quantum_tokens=100)


def ask(tenant: str = "t", tokens: int = 10, quota: Quota = UNLIMITED, **more: object) -> Ask:
    return replace(Ask(tenant=tenant, quota=quota, tokens=tokens), **more)  # type: ignore[arg-type]


def arrived(machine: Admission, one: Ask, now: float = 0.0) -> Ticket:
    ticket = machine.arrive(one, now)
    assert not isinstance(ticket, Refused), ticket
    return ticket


def running(machine: Admission, one: Ask, now: float = 0.0) -> Ticket:
    ticket = arrived(machine, one, now)
    assert machine.moves(now) == [Go(ticket)]
    return ticket


def refused(machine: Admission, one: Ask, now: float = 0.0) -> tuple[Limit, float | None]:
    answer = machine.arrive(one, now)
    assert isinstance(answer, Refused)
    machine.check()
    return answer.limit, answer.retry_after_s


def test_what_is_not_used_is_given_back():
    """The next may have it at once."""
    machine, quota = Admission(PARAMS), Quota(tokens_per_min=100)
    first = running(machine, ask(tokens=100, quota=quota))
    assert refused(machine, ask(tokens=30, quota=quota)) == (Limit.TOKENS, pytest.approx(18.0))
    machine.finish(first, 70, 0.0)
    running(machine, ask(tokens=30, quota=quota))


def test_retry_after_is_when_it_is_let_in():
    """For a tenant's own rates exactly."""
    for quota, limit in ((Quota(requests_per_min=2), Limit.REQUESTS), (Quota(tokens_per_min=20), Limit.TOKENS)):
        machine = Admission(PARAMS)
        for _ in range(2):
            machine.finish(running(machine, ask(quota=quota)), 10, 0.0)
        which, retry_after_s = refused(machine, ask(quota=quota))
        assert which is limit and retry_after_s is not None
        assert refused(machine, ask(quota=quota), retry_after_s - 1)[0] is limit
        running(machine, ask(quota=quota), retry_after_s)


def test_what_a_limit_never_allows_is_no_matter_of_time():
    for quota in (Quota(tokens_per_min=5), Quota(max_concurrent=2)):
        assert refused(Admission(PARAMS), ask(quota=quota, sequences=3)) == (Limit.SIZE, None)
    assert refused(Admission(PARAMS), ask(sequences=3)) == (Limit.SIZE, None)


def test_field_E4_no_more_run_than_the_workers_take_on():
    """The next one waits for a place, also for one that comes with another worker; what is larger than they are
    together goes when it is alone."""
    machine = Admission(replace(PARAMS, max_running=9))
    machine.places = 2
    first = running(machine, ask(sequences=2))
    waits = arrived(machine, ask())
    assert machine.moves(0.0) == []
    machine.places = 3
    assert machine.moves(0.0) == [Go(waits)]
    large = arrived(machine, ask(sequences=5))
    for ticket in (first, waits):
        assert machine.moves(0.0) == []
        machine.finish(ticket, 1, 0.0)
    assert machine.moves(0.0) == [Go(large)]
    machine.check()


def test_routers_share_a_limit():
    """Two of them grant half each; the one that is left, the whole."""
    machine, quota = Admission(PARAMS), Quota(requests_per_min=4, parts=2)
    for _ in range(2):
        machine.finish(running(machine, ask(quota=quota)), 0, 0.0)
    assert refused(machine, ask(quota=quota))[0] is Limit.REQUESTS
    whole = replace(quota, parts=1)
    for _ in range(2):
        machine.finish(running(machine, ask(quota=whole)), 0, 0.0)
    assert refused(machine, ask(quota=whole))[0] is Limit.REQUESTS


def test_one_at_least_runs_however_many_routers_there_are():
    machine, quota = Admission(PARAMS), Quota(max_concurrent=2, parts=9)
    first = running(machine, ask(quota=quota, sequences=2))
    assert refused(machine, ask(quota=quota))[0] is Limit.CONCURRENCY
    machine.finish(first, 0, 1.0)
    running(machine, ask(quota=quota))


def test_the_queue_is_bounded_in_requests_and_tokens():
    machine = Admission(PARAMS)
    first = running(machine, ask())
    running(machine, ask())
    for _ in range(4):
        arrived(machine, ask())
    assert refused(machine, ask())[0] is Limit.QUEUE
    machine.finish(first, 10, 1.0)
    assert len(machine.moves(1.0)) == 1
    assert refused(machine, ask(tokens=971), 1.0)[0] is Limit.QUEUE
    arrived(machine, ask(tokens=970), 1.0)


def test_the_wait_is_told_from_how_fast_requests_end():
    """Two at a time, two seconds each: with four that wait, a fifth finds room when one has gone: in a second."""
    machine = Admission(PARAMS)
    tickets = [running(machine, ask()) for _ in range(2)]
    for ticket in tickets:
        machine.finish(ticket, 10, 2.0)
    for _ in range(2):
        running(machine, ask(), 2.0)
    for _ in range(4):
        arrived(machine, ask(), 2.0)
    assert refused(machine, ask(), 2.0) == (Limit.QUEUE, pytest.approx(1.0))
    assert refused(machine, ask(patience_s=4.9), 2.0)[0] is Limit.DEADLINE
    assert refused(machine, ask(patience_s=5.1), 2.0)[0] is Limit.QUEUE
    slow = Admission(replace(PARAMS, max_wait_s=0.5))
    first = running(slow, ask())
    running(slow, ask())
    slow.finish(first, 0, 2.0)
    running(slow, ask(), 2.0)
    assert refused(slow, ask(), 2.0) == (Limit.WAIT, pytest.approx(0.5))


def test_a_full_queue_makes_room_for_whom_it_is_not_full_of():
    """The flood's last request is turned away instead."""
    machine = Admission(PARAMS)
    for _ in range(2):
        running(machine, ask("flood"))
    waiting = [arrived(machine, ask("flood")) for _ in range(4)]
    other = arrived(machine, ask("other"))
    [turned] = machine.moves(0.0)
    assert isinstance(turned, Turned) and turned.ticket == waiting[3] and turned.refused.limit is Limit.SHARE
    machine.check()
    machine.withdraw(other)
    machine.withdraw(other)
    machine.check()


def test_tenants_that_were_here_long_ago_are_forgotten():
    """Those that owe something are not."""
    machine, quota = Admission(PARAMS), Quota(requests_per_min=60)
    for number in range(1000):
        machine.finish(running(machine, ask(f"t{number}", quota=quota), float(number)), 0, float(number))
    assert len(machine._accounts) < 200
    machine.check()


TENANTS = {
    "open": UNLIMITED,
    "rated": Quota(requests_per_min=6, tokens_per_min=600),
    "heavy": Quota(weight=3.0, max_concurrent=3),
    "shared": Quota(tokens_per_min=900, max_concurrent=2, parts=3),
}


class AnyOrder(RuleBasedStateMachine):
    """Requests come, wait, leave and end in any order; whatever happens, the books are right and no limit is passed."""

    tickets = Bundle("tickets")

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.machine = Admission(
            AdmissionParams(
                max_running=3,
                max_running_tokens=500,
                max_queued_requests=5,
                max_queued_tokens=800,
                quantum_tokens=64,
                ageing_s=5.0,
            )
        )
        self.asks: dict[Ticket, Ask] = {}
        self.waiting: set[Ticket] = set()
        self.running: set[Ticket] = set()
        #: What each tenant has really used, and how many of its requests had a turn.
        self.used: dict[str, int] = dict.fromkeys(TENANTS, 0)
        self.let_in: dict[str, int] = dict.fromkeys(TENANTS, 0)

    def move(self) -> None:
        for move in self.machine.moves(self.now):
            self.waiting.remove(move.ticket)
            if isinstance(move, Go):
                self.running.add(move.ticket)
                self.let_in[self.asks[move.ticket].tenant] += 1

    @rule(
        target=tickets,
        tenant=st.sampled_from(sorted(TENANTS)),
        tokens=st.integers(1, 600),
        sequences=st.integers(1, 3),
        priority=st.sampled_from(Priority),
        patience_s=st.none() | st.floats(-1, 60),
    )
    def arrive(
        self, tenant: str, tokens: int, sequences: int, priority: Priority, patience_s: float | None
    ) -> Ticket | None:
        one = Ask(
            tenant=tenant,
            quota=TENANTS[tenant],
            tokens=tokens,
            sequences=sequences,
            priority=priority,
            patience_s=patience_s,
        )
        answer = self.machine.arrive(one, self.now)
        if isinstance(answer, Refused):
            assert answer.retry_after_s is None or 0 < answer.retry_after_s < math.inf
            self.move()
            return None
        self.asks[answer] = one
        self.waiting.add(answer)
        self.move()
        return answer

    @rule(ticket=consumes(tickets), share=st.floats(0, 1))
    def end(self, ticket: Ticket | None, share: float) -> None:
        if ticket in self.running:
            assert ticket is not None
            one = self.asks[ticket]
            self.used[one.tenant] += round(one.tokens * share)
            self.machine.finish(ticket, round(one.tokens * share), self.now)
            self.running.discard(ticket)
            self.move()

    @rule(ticket=consumes(tickets))
    def leave(self, ticket: Ticket | None) -> None:
        if ticket is not None:
            if ticket in self.running:
                self.let_in[self.asks[ticket].tenant] -= 1
            self.machine.withdraw(ticket)
            self.waiting.discard(ticket)
            self.running.discard(ticket)
            self.move()

    @rule(places=st.none() | st.integers(1, 5))
    def workers_come_and_go(self, places: int | None) -> None:
        self.machine.places = places
        self.move()

    @rule(seconds=st.floats(0, 30))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.move()

    @invariant()
    def the_books_are_right(self) -> None:
        self.machine.check()
        assert len(self.machine.turns) == len(self.waiting)
        assert self.machine.running == sum(self.asks[ticket].sequences for ticket in self.running)

    @invariant()
    def no_limit_is_passed(self) -> None:
        for name, quota in TENANTS.items():
            held = [self.asks[each] for each in self.running | self.waiting if self.asks[each].tenant == name]
            if quota.max_concurrent is not None:
                sequences = sum(one.sequences for one in held)
                assert sequences <= (quota.concurrent or 0) or len(held) == 1
            if quota.requests_per_min is not None:
                assert self.let_in[name] <= quota.requests_per_min / 60 * self.now + quota.requests_per_min + 1e-3
            if quota.tokens_per_min is not None:
                used = self.used[name] + sum(one.tokens for one in held)
                granted = quota.tokens_per_min / quota.parts / 60 * self.now
                assert used <= granted + quota.tokens_per_min + 1e-3

    @invariant()
    def nobody_waits_for_nothing(self) -> None:
        assert self.running or not self.waiting

    def teardown(self) -> None:
        """Everything comes back."""
        while self.running:
            self.machine.finish(self.running.pop(), 0, self.now)
            self.move()
        assert not self.waiting
        for account in self.machine._accounts.values():
            assert account.untouched(self.now + 1e6)
        self.machine.check()
        assert (self.machine.running, self.machine.running_tokens) == (0, 0)


AnyOrder.TestCase.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
TestAnyOrder = AnyOrder.TestCase
