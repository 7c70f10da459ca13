"""The light load of a drill: a few clients that ask one thing after the other, and know what is right.

Half of what they ask has been answered before the fault: that is its reference. The other half is new, because what was
answered before may come out of a cache; its reference is asked for when the drill is over and all is quiet.
"""

import itertools
import random
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from http.client import HTTPException

from services.drill.bounds import Sent
from services.http_client import AnswerFailed, chat

WORDS = ("amber", "bell", "copper", "dune", "ember", "fjord", "garnet", "harbour", "iris", "juniper", "kelp", "lantern")
#: Prompts whose answers are known before the fault.
KNOWN = 4
PAUSE_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What is asked, where, and for how long an answer may be silent before it counts as hung."""

    endpoint: str
    model: str
    key: str = ""
    words: int = 600
    max_tokens: int = 16
    hang_s: float = 90.0

    def prompt(self, seed: int) -> str:
        chosen = random.Random(seed)
        return f"{seed} " + " ".join(chosen.choice(WORDS) for _ in range(self.words))

    def send(self, seed: int) -> tuple[Sent, str]:
        """With the text of the answer."""
        begun_s = time.monotonic()
        try:
            *_, answer = chat(
                self.endpoint,
                self.model,
                self.prompt(seed),
                self.max_tokens,
                key=self.key,
                timeout_s=self.hang_s,
            )
        except TimeoutError:
            return Sent(begun_s, time.monotonic(), error="no answer", hung=True), ""
        except (AnswerFailed, OSError, HTTPException, ValueError) as error:
            return Sent(begun_s, time.monotonic(), error=f"{type(error).__name__}: {error}"[:200]), ""
        told = answer.receipt
        path, prefill, decode = (str(told.get(name) or "") for name in ("path", "prefill", "decode"))
        return Sent(begun_s, time.monotonic(), path, prefill, decode), answer.text


@dataclass(slots=True)
class Load:
    """`start`, then `stop`; each of the clients is a thread of its own. `seed` sets drills apart."""

    ask: Ask
    clients: int
    seed: int
    sent: list[Sent] = field(default_factory=list)
    _known: dict[int, str] = field(default_factory=dict)
    _new: dict[int, tuple[int, str]] = field(default_factory=dict)
    _threads: list[threading.Thread] = field(default_factory=list)
    #: When each client's request under way began.
    _begun: dict[int, float] = field(default_factory=dict)
    _stop: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def learn(self) -> list[str]:
        """Ask for the references; what went wrong, if anything did."""
        errors = []
        for seed in self._seeds(0, KNOWN):
            sent, text = self.ask.send(seed)
            self._known[seed] = text
            errors += [sent.error] if sent.error else []
        return errors

    def start(self) -> None:
        new = self._seeds(KNOWN, None)
        for number in range(self.clients):
            thread = threading.Thread(target=self._run, args=(number, new), name=f"client {number}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        """Begin nothing new, and wait for what is under way, but not for ever: what has not ended by then has hung."""
        self._stop.set()
        deadline = time.monotonic() + 2 * self.ask.hang_s
        for number, thread in enumerate(self._threads):
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                with self._lock:
                    begun_s = self._begun.get(number, deadline)
                    self.sent.append(Sent(begun_s, time.monotonic(), error="no end", hung=True))

    def check(self) -> int:
        """Compare what was new with what is answered now; how many answers were compared in all."""
        unchecked = 0
        with self._lock:
            new = tuple(self._new.items())
        for seed, (at, text) in new:
            again, reference = self.ask.send(seed)
            if again.error:
                unchecked += 1
            else:
                self.sent[at] = self.sent[at]._replace(wrong=text != reference)
        return sum(not one.error for one in self.sent) - unchecked

    def so_far(self) -> Sequence[Sent]:
        with self._lock:
            return tuple(self.sent)

    def _seeds(self, first: int, stop: int | None) -> Iterator[int]:
        numbers = itertools.count(first) if stop is None else iter(range(first, stop))
        return (self.seed * 1_000_000 + number for number in numbers)

    def _run(self, number: int, new: Iterator[int]) -> None:
        known = itertools.cycle(self._known)
        for turn in itertools.count(number):
            if self._stop.wait(PAUSE_S):
                return
            with self._lock:
                seed = next(known) if turn % 2 else next(new)
                self._begun[number] = time.monotonic()
            sent, text = self.ask.send(seed)
            with self._lock:
                if (right := self._known.get(seed)) is not None:
                    sent = sent._replace(wrong=not sent.error and text != right)
                elif not sent.error:
                    self._new[seed] = (len(self.sent), text)
                self.sent.append(sent)
