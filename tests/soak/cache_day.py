"""A scripted day of chats: conversations that go on, share system prompts, are edited, left and taken up again.

The script is drawn from a seed alone. Every prompt is token ids, so that nothing of it depends on a tokenizer; the only
thing a day learns as it goes is what was answered, which the next turn repeats.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

VOCAB = 500
#: Systems that several conversations begin with, in tokens.
SYSTEM_TOKENS = (64, 200, 333, 700, 1500)
TURNS, USER_TOKENS, ANSWER_TOKENS = (2, 5), (10, 300), (6, 24)
#: How often a turn changes what was said before, and how often its client leaves before the answer has ended.
EDITED, LEFT = 0.12, 0.08


@dataclass(slots=True)
class Turn:
    """`edit_at` (a share of the history) and `edit`: what the user changes before asking. `leaves_after`: tokens after
    which the client is gone."""

    user: list[int]
    max_tokens: int
    edit_at: float | None
    edit: int
    leaves_after: int | None


@dataclass(slots=True)
class Conversation:
    """`history`: what the next turn begins with."""

    number: int
    history: list[int]
    turns: list[Turn] = field(default_factory=list)

    def prompt(self, turn: Turn) -> list[int]:
        history = list(self.history)
        if turn.edit_at is not None:
            history[int(turn.edit_at * len(history))] = turn.edit
        return history + turn.user

    def goes_on(self, prompt: list[int], answer: list[int]) -> None:
        self.history = prompt + answer


def day(conversations: int, seed: int) -> list[Conversation]:
    """All conversations of the day, by number."""
    random = np.random.default_rng(seed)

    def words(count: int) -> list[int]:
        return [int(token) for token in random.integers(3, VOCAB, count)]

    systems = [words(count) for count in SYSTEM_TOKENS]
    made = []
    for number in range(conversations):
        each = Conversation(number, list(systems[int(random.integers(len(systems)))]))
        for place in range(int(random.integers(TURNS[0], TURNS[1] + 1))):
            max_tokens = int(random.integers(ANSWER_TOKENS[0], ANSWER_TOKENS[1] + 1))
            edited, left = random.random() < EDITED and place > 0, random.random() < LEFT
            each.turns.append(
                Turn(
                    user=words(int(random.integers(USER_TOKENS[0], USER_TOKENS[1] + 1))),
                    max_tokens=max_tokens,
                    edit_at=float(random.random()) if edited else None,
                    edit=int(random.integers(3, VOCAB)),
                    leaves_after=int(random.integers(1, max_tokens)) if left else None,
                )
            )
        made.append(each)
    return made


def order(conversations: list[Conversation], seed: int, at_once: int) -> Iterator[list[tuple[Conversation, Turn]]]:
    """The turns of the day, `at_once` of different conversations together; each conversation in its own order. Those
    that have begun go on more often than new ones begin, as in a chat service."""
    random = np.random.default_rng(seed + 1)
    waiting = [each for each in conversations if each.turns]
    places = {each.number: 0 for each in conversations}
    window = 24
    while waiting:
        count = min(at_once, len(waiting))
        chosen = random.choice(min(window, len(waiting)), size=min(count, window), replace=False)
        group = [waiting[int(index)] for index in chosen]
        batch = []
        for each in group:
            batch.append((each, each.turns[places[each.number]]))
            places[each.number] += 1
        waiting = [each for each in waiting if places[each.number] < len(each.turns)]
        yield batch
