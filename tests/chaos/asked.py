"""What is asked while things break, and what the answers must be: computed beforehand by the same engine alone.

An answer is right if it is the reference, token by token. There is no allowance for ties (two tokens so near to each
other that the order of additions decides): prompts with one on their way are not asked. `TIE` says what one is.
"""

import copy
import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from prfaas.engine.loading import load_engine
from prfaas.engine.port import Cache, Engine, StepInput
from prfaas.flows.ports import TokenBatch
from prfaas.kvcache.layout import chunk_ends
from prfaas.request import TOKEN_BYTES, FinishReason, Sampling
from prfaas.tokenizer.port import Tokenizer
from prfaas.tokenizer.text import load_tokenizer, pack
from services.router.openai.generation import TextAssembler
from tests.e2e.reference import packed, token_ids

#: Two greedy tokens are tied where their logits are nearer to each other than this part of the spread of the best
#: eight; a drawn one, where a change of the temperature by this part draws another.
TIE = 1e-4
#: Of prompts, in tokens: what stays where it is decoded, and what is prefilled in the other region.
SHORT_TOKENS, LONG_TOKENS, THRESHOLD_TOKENS = (20, 60, 150, 300), (600, 700, 900, 1300), 500
ANSWER_TOKENS = (8, 16, 32, 48)
#: Of some streams: they take seconds, so that what fails does so in their middle.
LONG_ANSWER_TOKENS = 150
#: How many different ones there are.
COUNT = 10


@dataclass(frozen=True, slots=True)
class Choice:
    tokens: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Asked:
    """One request, and what each of its choices must be. Streams that do not show their tokens go the short way
    through the router."""

    name: str
    prompt: tuple[int, ...]
    max_tokens: int
    stream: bool
    shows_tokens: bool
    temperature: float = 0.0
    seed: int | None = None
    n: int = 1
    stop: str | None = None
    expected: tuple[Choice, ...] = ()

    def body(self, model: str) -> dict[str, Any]:
        extra: dict[str, Any] = {"ignore_eos": True, "return_token_ids": self.shows_tokens}
        return {
            "model": model,
            "prompt": list(self.prompt),
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
            "n": self.n,
            "stop": self.stop,
            "stream": self.stream,
            "extra_body": extra,
        }

    @property
    def finish(self) -> str:
        return "stop" if self.stop is not None else "length"

    def samplings(self) -> Iterator[Sampling]:
        """Of each choice. The seeds of those after the first are part of what the API promises."""
        for choice in range(self.n):
            seed = (self.seed or 0) % 2**64
            if choice:
                seed = int.from_bytes(
                    hashlib.blake2b(b"%d/%d" % (self.seed or 0, choice), digest_size=8).digest(), "little"
                )
            yield Sampling(max_tokens=self.max_tokens, temperature=self.temperature, seed=seed)


def all_asked(model_dir: Path, count: int = COUNT) -> list[Asked]:
    """With their answers. Half of them are long."""
    engine, tokenizer = load_engine(model_dir), load_tokenizer(model_dir)
    found: list[Asked] = []
    for number in itertools.count():
        if len(found) == count:
            return found
        asked = _asked(number, len(found))
        answers = [_answer(engine, asked.prompt, sampling) for sampling in asked.samplings()]
        untied = [tokens for tokens in answers if tokens is not None]
        if len(untied) < len(answers):
            continue
        choices = tuple(Choice(tuple(tokens), _text(tokenizer, tokens)) for tokens in untied)
        found.append(replace(asked, expected=choices) if asked.stop is None else _stopped(asked, choices[0]))
    raise AssertionError


def _text(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    return TextAssembler(tokenizer, (), ()).take(TokenBatch(tokens=pack(tokens), finish=FinishReason.LENGTH)).text


def _asked(number: int, place: int) -> Asked:
    """`place` says what kind it is, `number` which of that kind."""
    length = (SHORT_TOKENS, LONG_TOKENS)[place % 2][place // 2 % 4] + number % 7
    prompt, max_tokens = tuple(token_ids(length, seed=number)), ANSWER_TOKENS[place % 4 if place % 3 else 3]
    max_tokens = LONG_ANSWER_TOKENS if place % 5 in (1, 2) else max_tokens
    # How far the others are cannot be told, so that what takes long is a stream.
    streams = place % 4 != 3 or max_tokens == LONG_ANSWER_TOKENS
    common = Asked(f"{place}:", prompt, max_tokens, stream=streams, shows_tokens=place % 3 != 1)
    match place % 5:
        case 0 | 1:
            return replace(common, name=f"{place}: greedy of {length}")
        case 2:
            return replace(common, name=f"{place}: seeded of {length}", temperature=0.8, seed=number)
        case 3:
            return replace(common, name=f"{place}: two of {length}", temperature=1.1, seed=1 << 40 | number, n=2)
        case _:
            name = f"{place}: stop of {length}"
            return replace(common, name=name, max_tokens=ANSWER_TOKENS[-1], temperature=0.7, seed=-1 - number, stop="?")


def _stopped(asked: Asked, whole: Choice) -> Asked:
    """It stops at what the reference says two thirds on, wherever that comes first."""
    at = 2 * len(whole.text) // 3
    stop = whole.text[at : at + 3]
    return replace(asked, stop=stop, expected=(Choice(whole.tokens, whole.text[: whole.text.index(stop)]),))


def _answer(engine: Engine, prompt: Sequence[int], sampling: Sampling) -> list[int] | None:
    """None when a tie was near. Prefill to N-1 by chunks, then the last token alone, then decode, each by itself; with
    the temperature a little off, the same must be drawn."""
    factors = (1.0,) if not sampling.temperature or engine.info.repeatable else (1.0, 1 - TIE, 1 + TIE)
    samplings = [replace(sampling, temperature=sampling.temperature * factor) for factor in factors]
    caches = [_prefilled(engine, prompt)]
    caches += [copy.deepcopy(caches[0]) for _ in samplings[1:]]
    output = [prompt[-1]]
    for _ in range(sampling.max_tokens):
        steps = [
            engine.step([StepInput(cache, output[-1], each)])[0] for cache, each in zip(caches, samplings, strict=True)
        ]
        logits = [logit for _, logit in steps[0].top_logits[:8]]
        tied = not sampling.temperature and (logits[0] - logits[1]) / (logits[0] - logits[-1]) < TIE
        if tied or len({step.token_id for step in steps}) > 1:
            return None
        output.append(steps[0].token_id)
    return output[1:]


def _prefilled(engine: Engine, prompt: Sequence[int]) -> Cache:
    cache, ids = engine.new_cache(), packed(list(prompt))
    ends = chunk_ends(len(prompt) - 1, engine.info.chunk_tokens)
    for start, stop in itertools.pairwise((0, *ends)):
        engine.prefill(cache, ids[start * TOKEN_BYTES : stop * TOKEN_BYTES], None)
    return cache
