"""Two nodes far too small for what is asked of them: every order in which prefills, hand-offs, decodes and ends can
come. The books of admission and the pools are the real ones; the steps are those of the worker's stories.

What must hold: what has been admitted never meets a lack of room, however long its answer gets; nothing that is refused
leaves anything behind; and whatever holds room can go on to its end without any other giving some up, so that there is
nothing to deadlock on.
"""

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from prfaas.errors import Overloaded
from prfaas.kvcache.blocks import BlockPool
from prfaas.node.admission import Admission, Limits
from prfaas.request import AttemptId

BLOCK = 64
ROW_BYTES = 4
LIMITS = Limits(max_sequences=4, max_tokens=300, max_prefill_tokens=200, max_prefills=3)
POOL_BYTES = 10 * BLOCK


@dataclass
class Node:
    admission: Admission = field(default_factory=lambda: Admission(LIMITS))
    pool: BlockPool = field(default_factory=lambda: BlockPool(POOL_BYTES, BLOCK))

    def give_back(self, attempt: AttemptId) -> None:
        """As the end of a tenure: the engine has let go, then the pump, then admission."""
        self.pool.free(attempt)
        self.admission.release(attempt)


@dataclass
class Asked:
    """One request on its way. `far`: its KV comes from the other node."""

    attempt: AttemptId
    prompt: int
    output: int
    far: bool
    stage: str = "reserved"
    generated: int = 0


class PressureMachine(RuleBasedStateMachine):
    asked = Bundle("asked")

    def __init__(self) -> None:
        super().__init__()
        self.source, self.decode = Node(), Node()
        self.alive: dict[AttemptId, Asked] = {}
        self.count = self.refused = 0

    @rule(target=asked, prompt=st.integers(1, 200), output=st.integers(1, 200), far=st.booleans())
    def reserve(self, prompt: int, output: int, far: bool):
        """Prompt and answer count before either is there, and the span of what comes from elsewhere with them."""
        self.count += 1
        one = Asked(AttemptId(f"{self.count:032x}"), prompt, output, far)
        try:
            self.decode.admission.take_sequence(one.attempt, prompt + output)
        except Overloaded:
            self.refused += 1
            return multiple()
        if far and self.decode.pool.reserve(one.attempt, prompt * ROW_BYTES) is None:
            self.decode.give_back(one.attempt)
            self.refused += 1
            return multiple()
        self.alive[one.attempt] = one
        return one

    @rule(one=asked)
    def prefill(self, one: Asked):
        if self.alive.get(one.attempt) is one and one.stage == "reserved":
            self.begin(one)

    @rule(one=asked)
    def step(self, one: Asked):
        if self.alive.get(one.attempt) is one and one.stage != "reserved":
            self.go_on(one)

    @rule(one=consumes(asked))
    def cancel(self, one: Asked):
        """The client leaves, or a deadline passes, at whatever stage."""
        if self.alive.get(one.attempt) is one:
            self.end(one)

    def begin(self, one: Asked) -> None:
        """Prefill on the node that decodes, or on the other one, which needs a span to send from. A refusal ends the
        attempt on both: nobody waits for room with room in hand."""
        node = self.source if one.far else self.decode
        try:
            node.admission.take_prefill(one.attempt, one.prompt)
            if one.far and node.pool.reserve(one.attempt, one.prompt * ROW_BYTES) is None:
                raise Overloaded("room for KV")
        except Overloaded:
            self.refused += 1
            self.end(one)
        else:
            one.stage = "prefilling"

    def go_on(self, one: Asked) -> None:
        """The next step of one that has all it needs. None of them may be refused."""
        match one.stage:
            case "prefilling":
                (self.source if one.far else self.decode).admission.end_prefill(one.attempt)
                if one.far:
                    self.source.give_back(one.attempt)
                one.stage = "handed over"
            case "handed over":
                self.decode.pool.free(one.attempt)
                one.stage = "decoding"
            case _:
                one.generated += 1
                if one.generated == one.output:
                    self.end(one)

    def end(self, one: Asked) -> None:
        for node in (self.source, self.decode):
            node.give_back(one.attempt)
        del self.alive[one.attempt]

    @invariant()
    def within_bounds(self):
        """What is in the engine now, and what it may grow to, is within what was admitted; no byte is lost."""
        for node in (self.source, self.decode):
            node.admission.check()
            node.pool.check()
        now = sum(one.prompt + one.generated for one in self.alive.values())
        at_most = sum(one.prompt + one.output for one in self.alive.values())
        assert now <= at_most == self.decode.admission.committed_tokens <= LIMITS.max_tokens
        flying = [
            one for one in self.alive.values() if one.far and one.stage in ("reserved", "prefilling", "handed over")
        ]
        assert self.decode.pool.spans == len(flying)
        assert self.source.pool.spans == sum(one.stage == "prefilling" for one in flying)

    def teardown(self):
        """One after the other, while the later ones keep all that they hold: each ends by its own steps alone, and both
        nodes are empty."""
        for one in [*self.alive.values()]:
            if one.stage == "reserved":
                self.begin(one)
            while one.attempt in self.alive:
                self.go_on(one)
        for node in (self.source, self.decode):
            assert (node.admission.committed_tokens, node.admission.prefill_tokens) == (0, 0)
            assert (node.admission.sequences, node.admission.prefills) == (0, 0)
            assert (node.pool.spans, node.pool.free_bytes) == (0, POOL_BYTES)


TestPressureMachine = PressureMachine.TestCase
TestPressureMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
