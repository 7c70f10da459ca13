"""KV transfers over lines that fail in every way: nothing wrong is ever delivered, and when the faults end everything
ends."""

import pytest

from tests.simulation.transfer_world import World

RUNS = 2000
RUNS_OF_A_TEST = 250
FAULTS_S = 6.0
#: Longest time-out of an attempt, and some more.
SETTLE_S = 30.0


@pytest.mark.parametrize("first", range(0, RUNS, RUNS_OF_A_TEST))
def test_transfers_survive_what_lines_do(first: int):
    """Whatever is delivered is what was sent, nothing touches memory that is not its own, every attempt ends once on
    each side, and once the line is good transfers arrive and all counters are back at base line."""
    for seed in range(first, first + RUNS_OF_A_TEST):
        try:
            run(seed)
        except Exception as error:
            pytest.fail(f"seed {seed}: {type(error).__name__} {error}")


def test_the_faults_are_what_they_are_meant_to_be():
    """A hundred runs have seen every one of them, and most ways of ending."""
    seen: dict[str, int] = {}
    for seed in range(100):
        for what, count in run(seed).counts.items():
            seen[what] = seen.get(what, 0) + count
    faults = {"cut", "cut_all", "dark", "half_open", "stuck", "restart_receiver", "restart_sender"}
    causes = {"aborted", "checksum", "expired"}
    ends = {"delivered", *(f"{side} lost: {cause}" for side in ("sender", "receiver") for cause in causes)}
    assert (
        faults | ends | {"discard None", "discard closed_attempt", "hang in", "hang out", "kept in part"} <= seen.keys()
    )
    assert {"sender lost: incarnation", "sender lost: connect", "sender lost: peer_gone"} <= seen.keys()


def test_the_same_seed_is_the_same_run():
    assert run(7).counts == run(7).counts


def run(seed: int) -> World:
    world = World(seed, senders=1 + seed % 2, receivers=1 + seed // 2 % 2)
    rng = world.rng
    world.tick()
    for _ in range(rng.randint(3, 10)):
        world.after(rng.random() * FAULTS_S, world.transfer)
    world.after(rng.random(), world.fault)
    at = 0.0
    while at < FAULTS_S:
        at += 0.2
        world.run(at)
        world.check()
    world.heal()
    for _ in range(3):
        world.after(0.5 + rng.random(), lambda: world.transfer(orderly=True))
    world.run(FAULTS_S + SETTLE_S)
    world.balance()
    return world
