"""Load for real pumps: many transfers, aborts at any point; and what a pump process uses of the system."""

import random
from collections import Counter
from pathlib import Path

import psutil

from prfaas.transfer.pump import messages as m
from tests.integration.kv_pumps import (
    LAYOUT,
    Line,
    Pump,
    assert_same_parts,
    attempt_id,
    end,
    parts_of,
    start_transfer,
)


def time_wait(*pumps: Pump) -> int:
    """Connections to these that the system still remembers."""
    ends, rows = {f":{pump.port:04X}" for pump in pumps}, Path("/proc/net/tcp").read_text().splitlines()[1:]
    found = [row.split()[1:4] for row in rows]
    return sum(state == "06" and not ends.isdisjoint((ours[-5:], theirs[-5:])) for ours, theirs, state in found)


def usage(pump: Pump) -> tuple[int, int, int]:
    """Descriptors, threads, resident bytes."""
    process = psutil.Process(pump.process.pid)
    return process.num_fds(), process.num_threads(), process.memory_info().rss


def transfer_some(source: Pump, target: Pump, count: int) -> None:
    attempts = [start_transfer(source, target, 16)[0] for _ in range(count)]
    for attempt in attempts:
        source.tell(m.PartsReady(attempt, parts_of(16)))
    for attempt in attempts:
        assert isinstance(source.outcome(attempt), m.Sent)
        assert isinstance(target.outcome(attempt), m.Received)
    end_all(attempts, source, target)


def end_all(attempts: list[str], *pumps_: Pump) -> None:
    for pump in pumps_:
        for attempt in attempts:
            pump.tell(m.Release(attempt))
    for pump in pumps_:
        for attempt in attempts:
            pump.await_event(m.Released, attempt)


def outcomes(pump: Pump, attempts: list[str]) -> Counter[str]:
    """How often each attempt ended, by what nobody has waited for."""
    ended = [event for kind in (m.Sent, m.Received, m.TransferLost) for event in pump.pending(kind)]
    return Counter(event.attempt for event in ended if event.attempt in attempts)


def abort_some(source: Pump, target: Pump, draw: random.Random, count: int) -> list[str]:
    """Attempts that were released at random points of their life, in batches, and are gone."""
    attempts: list[str] = []
    for _ in range(count // 8):
        batch = [_abort_somewhere(source, target, draw) for _ in range(8)]
        for pump in (source, target):
            for attempt in batch:
                pump.await_event(m.Released, attempt)
        attempts += batch
    return attempts


def lose_a_lane(source: Pump, target: Pump, line: Line, tokens: int, after_bytes: int) -> m.Sent:
    """A transfer over a slow line, of whose connections one ends when so much has arrived and more is on it. Nothing
    goes out twice but what was not acknowledged then, by what is told and by what is written."""
    was_written, was_received = source.assert_baseline().sent_bytes_total, target.assert_baseline().received_bytes_total
    attempt, here, there = start_transfer(source, target, tokens, address=line.address)
    source.tell(m.PartsReady(attempt, parts_of(tokens)))
    target.await_load(lambda load: load.received_bytes_total > was_received + after_bytes)
    line.hold()
    line.cut(1)
    line.flow()
    sent, received = source.outcome(attempt), target.outcome(attempt)
    assert isinstance(sent, m.Sent) and isinstance(received, m.Received), f"{sent} {received}"
    assert_same_parts(source, here, target, there, tokens)
    end(attempt, source, target)
    assert 0 < sent.resent_bytes <= sent.lost_bytes, f"{sent}"
    written_twice = source.assert_baseline().sent_bytes_total - was_written - LAYOUT.size_bytes(tokens)
    assert 0 <= written_twice <= sent.resent_bytes, f"{written_twice}, {sent}"
    return sent


def _abort_somewhere(source: Pump, target: Pump, draw: random.Random) -> str:
    """Bring an attempt to a random point, then release it on both sides, in either order."""
    attempt, tokens = attempt_id(), draw.randrange(0, 500)
    parts = list(parts_of(tokens))
    draw.shuffle(parts)
    split = draw.randrange(0, len(parts) + 1)
    there = target.reserve(attempt, tokens, receive=True)
    steps = [
        lambda: source.reserve(attempt, tokens, receive=False),
        lambda: source.tell(m.PartsReady(attempt, tuple(parts[:split]))),
        lambda: source.send_to(target, attempt, there, tokens),
        lambda: source.tell(m.PartsReady(attempt, tuple(parts[split:]))),
        lambda: source.outcome(attempt),
    ]
    for step in steps[: draw.randrange(0, len(steps) + 1)]:
        step()
    for pump in draw.sample([source, target], 2):
        pump.tell(m.Release(attempt))
    return attempt
