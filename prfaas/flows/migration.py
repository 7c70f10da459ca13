"""A stream that loses its decode node after its first token, and goes on elsewhere.

What the client has is never sent again: the next node gets the prompt with those tokens behind it, as one prompt, and
draws what follows them. That is exact because a token depends on the tokens before it and, where it is drawn by chance,
on seed and position; nodes of another namespace or without such a generator do not qualify, and an answer that has to
follow a grammar stays where it is, as an engine would begin the grammar anew.

All the client sees is a gap, of `migration_timeout_s` at most. `max_migrations` bounds what one request may cost the
others: a request that kills whoever decodes it kills no more nodes than that. A node that gives no room costs nothing
but time, in which it is asked again: when a node dies all its streams come to the others at once, which refuse what
would bury them, and others may have died with it.
"""

from dataclasses import dataclass, field, replace

from prfaas.cluster import SEEDED_DRAWS, ClusterView, Namespace, Node, NodeId
from prfaas.errors import PrfaasError
from prfaas.flows.ports import PrefillReport, Reservation, ServePorts
from prfaas.flows.story import Migration, Moved, Story
from prfaas.request import TOKEN_BYTES, Request, Route, Sampling

#: Between two rounds of asking nodes for room: the first wait, and the longest.
PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0


@dataclass(slots=True)
class Stream:
    """Where the tokens of one request come from, from its first token on. `lost` are the nodes that let go of it, each
    with the life in which it did: another life of the node may serve it."""

    request: Request
    story: Story
    ports: ServePorts
    max_migrations: int
    timeout_s: float
    #: The first that decoded: whoever goes on has to be like it.
    node: Node | None = None
    lost: dict[NodeId, int] = field(default_factory=dict)
    #: Attempts after the first token, but for those that were given no room.
    used: int = 0
    #: While no node decodes: what was the loss, until when another has to be found, and the next wait for one.
    loss: PrfaasError | None = None
    until_s: float = 0.0
    pause_s: float = PAUSE_S

    @property
    def is_over(self) -> bool:
        """Whether all tokens that were asked for are there."""
        return self.story.output_tokens >= self.request.sampling.max_tokens

    @property
    def left(self) -> int:
        return self.max_migrations - self.used

    @property
    def late(self) -> bool:
        return self.loss is not None and self.ports.now() >= self.until_s

    def within_s(self, seconds: float) -> float:
        """Of a wait that may take so long, what is left of it while the client waits for its next token."""
        return seconds if self.loss is None else min(seconds, max(0.0, self.until_s - self.ports.now()))

    def lose(self, error: PrfaasError, reservation: Reservation, spent: int) -> None:
        """The node that decoded is lost, to get to which had taken so many of the attempts that were left. Raises the
        error where nobody could go on."""
        now_s, story = self.ports.now(), self.story
        self.used += spent
        self.lost[reservation.decode] = reservation.incarnation
        move = Migration(story.output_tokens, story.last_s if story.last_s is not None else now_s)
        story.migrations.append(move)
        if self.is_over:
            move.outcome = Moved.COMPLETE
            return
        if self.node is None or not draws_again(self.request.sampling, self.node):
            move.outcome = Moved.INEXACT
            raise error
        self.loss, self.until_s, self.pause_s = error, now_s + self.timeout_s, PAUSE_S
        if self.left <= 0:
            self.given_up()

    def given_up(self) -> None:
        """Raises the loss, if there was one: it is more telling than what came of it."""
        if self.loss is not None:
            self.story.migrations[-1].outcome = Moved.EXHAUSTED
            raise self.loss from None

    def rest(self) -> Request:
        """What is still to be had: the client's request, with what it has got by now behind the prompt."""
        request, story = self.request, self.story
        assert len(story.generated) == story.output_tokens * TOKEN_BYTES, "a token was counted and not kept"
        left_tokens = request.sampling.max_tokens - story.output_tokens
        return replace(
            request,
            prompt=request.prompt + bytes(story.generated),
            sampling=replace(request.sampling, max_tokens=left_tokens),
        )

    def unfit(self, view: ClusterView) -> frozenset[NodeId]:
        """Who must not go on with it: nodes that were lost, as long as they live the same life, and those that would
        draw other tokens."""
        namespace, sampling = self.node.namespace if self.node is not None else Namespace(""), self.request.sampling
        others = [
            name
            for name in view.decode
            if (node := view.nodes[name]).namespace != namespace or not draws_again(sampling, node)
        ]
        dead = [
            name for name, life in self.lost.items() if (n := view.nodes.get(name)) is None or n.incarnation == life
        ]
        return frozenset((*others, *dead))

    async def another_round(self) -> bool:
        """Wait a little before all nodes are asked again; False when there is no time left for that."""
        if self.loss is None or self.ports.now() + self.pause_s >= self.until_s:
            return False
        await self.ports.sleep(self.pause_s)
        self.pause_s = min(2 * self.pause_s, LONGEST_PAUSE_S)
        return True

    def moved(self, route: Route, report: PrefillReport) -> None:
        """The first token is there that a new node has drawn."""
        move = self.story.migrations[-1]
        move.outcome, move.gap_s = Moved.MOVED, self.ports.now() - move.since_s
        move.path, move.prefill = route.path, report
        self.loss = None


def draws_again(sampling: Sampling, node: Node) -> bool:
    """Whether the node draws the same tokens as any other of its namespace that can."""
    return not sampling.constraint and (sampling.temperature == 0 or SEEDED_DRAWS in node.capabilities)
