"""Steady load on a live cluster: requests that come at a rate, each answer compared with the reference.

Few prompts come again and again: a cluster that should have work with them has no cache.
"""

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from openai import AsyncOpenAI

from services.local_cluster import LocalCluster
from tests.e2e.client import LIVENESS_S, Completed
from tests.e2e.reference import Alone, token_ids


@dataclass(frozen=True, slots=True)
class Kind:
    """Prompts of this length that ask for so many tokens."""

    prompt_tokens: int
    max_tokens: int


@dataclass
class Load:
    """`mix` is what comes, in turn; it and the rate may be changed while it runs. `done` is by the number that each
    request was sent under. Where several versions serve, an answer is right that is `alone`'s or one of the `others`'.
    """

    cluster: LocalCluster
    alone: Alone
    mix: Sequence[Kind]
    per_s: float
    others: Sequence[Alone] = ()
    sent: Counter[int] = field(default_factory=Counter)
    done: dict[int, Completed] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    _asking: set[asyncio.Task[None]] = field(default_factory=set)

    async def run(self) -> None:
        async with AsyncOpenAI(
            base_url=f"{self.cluster.endpoint}/v1", api_key="none", max_retries=0, timeout=120
        ) as client:
            try:
                for number in itertools.count():
                    task = asyncio.create_task(self._ask(client, number, self.mix[number % len(self.mix)]))
                    self._asking.add(task)
                    task.add_done_callback(self._asking.discard)
                    await asyncio.sleep(1 / self.per_s)
            finally:
                if self._asking:
                    await asyncio.wait(self._asking, timeout=4 * LIVENESS_S)

    async def now(self, mix: Sequence[Kind]) -> None:
        """From now on these come."""
        await self.prepare(mix)
        self.mix = mix

    async def prepare(self, mix: Sequence[Kind]) -> None:
        """Have the reference answers at hand before they are needed."""
        for kind in mix:
            ids = token_ids(kind.prompt_tokens, seed=kind.prompt_tokens)
            for version in (self.alone, *self.others):
                await asyncio.to_thread(version.answer, ids, kind.max_tokens)

    def check(self) -> None:
        """Every request was answered once, and rightly."""
        assert not self.wrong, self.wrong[:3]
        assert set(self.sent) == set(self.done) and max(self.sent.values()) == 1

    async def _ask(self, client: AsyncOpenAI, number: int, kind: Kind) -> None:
        ids = token_ids(kind.prompt_tokens, seed=kind.prompt_tokens)
        self.sent[number] += 1
        try:
            answer = await client.completions.create(
                model=self.cluster.plan.model_dir.name,
                prompt=ids,
                max_tokens=kind.max_tokens,
                temperature=0,
                extra_headers={"x-prfaas-receipt": "1", "x-request-id": f"load-{number}"},
                extra_body={"return_token_ids": True},
            )
        except Exception as error:
            self.wrong.append(f"request {number}: {error!r}")
            return
        assert answer.model_extra is not None and answer.choices[0].model_extra is not None
        completed = Completed(answer.choices[0].model_extra["token_ids"], answer.model_extra["prfaas_receipt"])
        if number in self.done:
            self.wrong.append(f"request {number} was answered twice")
        if completed.token_ids not in [one.answer(ids, kind.max_tokens) for one in (self.alone, *self.others)]:
            self.wrong.append(f"request {number}: other tokens than alone")
        self.done[number] = completed


@asynccontextmanager
async def loaded(
    cluster: LocalCluster, alone: Alone, mix: Sequence[Kind], per_s: float, others: Sequence[Alone] = ()
) -> AsyncIterator[Load]:
    """Load while the body runs; afterwards all that was asked has been answered, once, and rightly."""
    load = Load(cluster, alone, mix, per_s, others)
    await load.prepare(mix)
    running = asyncio.create_task(load.run())
    try:
        yield load
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    load.check()
