"""What a long prompt costs before anything is done with it: tokens, hashes, and the match in the index.

Measured by itself, in this process, on the harness's own prompt and with the router's own code: CPU time of all
threads.
"""

import asyncio
import random
import statistics
import time
from pathlib import Path

from bench.router.engine import BLOCKS, CONVERSATIONS
from bench.router.ours import PLAIN
from bench.router.results import Row
from prfaas.cluster import Incarnation, NodeId
from prfaas.kvcache.hashing import KEY_BYTES, unit_keys
from prfaas.kvcache.prefix import Change, ChangeKind
from prfaas.kvcache.region_index import RegionIndex
from prfaas.request import TOKEN_BYTES
from prfaas.tokenizer.text import TextTokenizer, load_tokenizer

TIMES = 7


def long_parts(model: Path, prompt: str) -> Row:
    """Medians."""
    medians = {name: round(statistics.median(us), 1) for name, us in asyncio.run(_measured(model, prompt)).items()}
    return Row(target=PLAIN.name, scenario="long-parts", more=medians)


async def _measured(model: Path, prompt: str) -> dict[str, list[float]]:
    tokenizer, (index, shard) = load_tokenizer(model), _index()
    parts: dict[str, list[float]] = {"tokenize_us": [], "hash_us": [], "match_us": []}
    for number in range(TIMES):
        text = _varied(tokenizer, prompt, number)
        begun = time.process_time()
        packed = await tokenizer.encode_aside(text, add_special_tokens=False)
        tokenized = time.process_time()
        keys = unit_keys(packed, "mock", b"")
        hashed = time.process_time()
        index.match([shard], keys, len(packed) // TOKEN_BYTES - 1, 0.0)
        matched = time.process_time()
        for name, seconds in zip(parts, (tokenized - begun, hashed - tokenized, matched - hashed), strict=True):
            parts[name].append(1e6 * seconds)
    tokenizer.close()
    return parts


def _varied(tokenizer: TextTokenizer, prompt: str, number: int) -> str:
    content = prompt.replace("VARYVARYVARYVARY", f"{random.Random(number).getrandbits(53):016d}", 1)
    return tokenizer.render([{"role": "user", "content": content}])


def _index() -> tuple[RegionIndex, NodeId]:
    index, shard, rng = RegionIndex(1 << 30), NodeId("shard-0"), random.Random(1)
    index.begin(shard, Incarnation(1), 0, 0.0)
    index.piece(shard, [Change(ChangeKind.KV_ADDED, rng.randbytes(BLOCKS * KEY_BYTES)) for _ in range(CONVERSATIONS)])
    index.end(shard)
    return index, shard
