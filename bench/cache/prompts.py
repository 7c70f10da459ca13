"""Index events of made-up conversations, as pools send them: several turns each below a few common system prompts.

A block is a hash unit. Keys are random bytes: to an index they look like hashes.
"""

import random
from collections.abc import Iterator
from typing import NamedTuple

from prfaas.cluster import NodeId
from prfaas.kvcache.hashing import HASH_UNIT_TOKENS, KEY_BYTES
from prfaas.kvcache.prefix import Change, ChangeKind
from prfaas.kvcache.radix import first_units
from prfaas.kvcache.states import EVERY_TOKENS

POOLS = tuple(NodeId(f"pool{number}") for number in range(4))
#: Units of a 128K-token prompt, and between two states that are kept on the way.
LONG = 128 * 1024 // HASH_UNIT_TOKENS
EVERY = EVERY_TOKENS // HASH_UNIT_TOKENS

#: Of a conversation. A turn has from 20 to 100 units: a run of the conversation trace has 186 in all.
TURNS, _SHORTEST, _LONGEST = 3, 20, 100
_SYSTEMS, _SYSTEM = 64, 32


class Event(NamedTuple):
    """What a pool tells, and how many blocks it has more or less by that."""

    pool: NodeId
    change: Change
    blocks: int


class Conversations:
    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self._systems = [self.keys(_SYSTEM) for _ in range(_SYSTEMS)]
        self._told: set[tuple[NodeId, int]] = set()

    def keys(self, count: int) -> bytes:
        return self._chance.randbytes(count * KEY_BYTES)

    def conversation(self) -> Iterator[Event]:
        """Each turn tells of all keys from the start of the prompt; a state stands at its end."""
        pool, system = self._chance.choice(POOLS), self._chance.randrange(_SYSTEMS)
        keys = self._systems[system]
        if (pool, system) not in self._told:
            self._told.add((pool, system))
            yield Event(pool, Change(ChangeKind.KV_ADDED, keys), _SYSTEM)
            yield Event(pool, Change(ChangeKind.STATE_ADDED, keys), 0)
        for _ in range(TURNS):
            new = self._chance.randint(_SHORTEST, _LONGEST)
            keys += self.keys(new)
            yield Event(pool, Change(ChangeKind.KV_ADDED, keys), new)
            yield Event(pool, Change(ChangeKind.STATE_ADDED, keys), 0)

    def long_prompt(self, branch_every: int) -> tuple[bytes, list[Event]]:
        """A prompt of 128K tokens with a state every 8K, that others have left every so many units."""
        pool, keys = self._chance.choice(POOLS), self.keys(LONG)
        events = [Event(pool, Change(ChangeKind.KV_ADDED, keys), LONG)]
        events += (
            Event(pool, Change(ChangeKind.STATE_ADDED, first_units(keys, at)), 0)
            for at in range(EVERY, LONG + 1, EVERY)
        )
        for at in range(branch_every, LONG, branch_every):
            left = first_units(keys, at) + self.keys(branch_every)
            events.append(Event(pool, Change(ChangeKind.KV_ADDED, left), branch_every))
        return keys, events
