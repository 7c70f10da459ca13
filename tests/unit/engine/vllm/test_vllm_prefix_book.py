"""What a vLLM server says of its prefix cache, and what an index is told."""

import hashlib
import random
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from prfaas.cluster import NodeId
from prfaas.engine.vllm.cache_salt import alone, cache_salt, salt_in
from prfaas.engine.vllm.geometry import CacheLayer, Geometry, attention_layer, recurrent_layer
from prfaas.engine.vllm.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, decode
from prfaas.engine.vllm.prefix_book import PrefixBook
from prfaas.kvcache.hashing import HASH_UNIT_TOKENS, KEY_BYTES, unit_keys
from prfaas.kvcache.prefix import Change, ChangeKind, PrefixIndex
from prfaas.request import Match

NS, SALT, OWNER = "namespace", b"\x01\x02", NodeId("node")
ROWS, STATES = 0, 1
OURS = cache_salt(SALT)


# As vLLM 0.32 packs them: field by field in the order of its own structs, defaults left out.
class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class Stored(msgspec.Struct, omit_defaults=True, tag="BlockStored"):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class Removed(msgspec.Struct, omit_defaults=True, tag="BlockRemoved"):
    block_hashes: list[int | bytes]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None


class Cleared(msgspec.Struct, omit_defaults=True, tag="AllBlocksCleared"):
    pass


class Novel(msgspec.Struct, tag="BlockRenamed"):
    what: str


def batch(*events: Any) -> bytes:
    return msgspec.msgpack.encode(EventBatch(1.5, list(events), 0))


def attention(block_tokens: int, group: int = ROWS, number: int = 1) -> CacheLayer:
    return attention_layer(f"model.layers.{number}.attn", group, block_tokens, "float32", 2, 8, 8)


def recurrent(block_tokens: int) -> CacheLayer:
    return recurrent_layer("model.layers.0.mixer", STATES, block_tokens, "mamba2", [("float32", (4,))], 16)


class Server:
    """A server's cache and its events, and an index that is told of them."""

    def __init__(self, *layers: CacheLayer) -> None:
        self.size = layers[0].block_tokens
        self.book, self.index = PrefixBook(NS, Geometry(layers)), PrefixIndex()

    def hash(self, tokens: Sequence[int], salt: str) -> int:
        return int.from_bytes(hashlib.sha256(repr((salt, *tokens)).encode()).digest()[:8], "big")

    def stored(
        self, tokens: Sequence[int], start: int = 0, group: int = ROWS, salt: str | None = OURS, **fields: Any
    ) -> Stored:
        """The blocks of a prompt from one of them on."""
        starts = range(start * self.size, len(tokens) - self.size + 1, self.size)
        hashes = [self.hash(tokens[: at + self.size], salt or "") for at in starts]
        parent = self.hash(tokens[: start * self.size], salt or "") if start else None
        first = (salt,) if salt else None
        event = Stored(
            hashes,
            parent,
            list(tokens[start * self.size : starts.stop and starts[-1] + self.size]),
            self.size,
            None,
            "GPU",
            None,
            extra_keys=[first if at == 0 else None for at in starts],
            group_idx=group,
            kv_cache_spec_kind="full_attention",
        )
        return msgspec.structs.replace(event, **fields)

    def state(self, tokens: Sequence[int], block: int) -> Stored:
        """As vLLM tells of the one state that is kept of a span: all tokens, one hash, and no word on where it ends."""
        whole = self.stored(tokens, group=STATES)
        return msgspec.structs.replace(whole, block_hashes=[whole.block_hashes[block]], extra_keys=[None])

    def removed(self, tokens: Sequence[int], block: int, group: int = ROWS) -> Removed:
        name = self.hash(tokens[: (block + 1) * self.size], cache_salt(SALT))
        return Removed([name], "GPU", group_idx=group)

    def says(self, *events: Any) -> list[Change]:
        changes = self.book.take(decode(batch(*events)))
        for change in changes:
            self.index.apply(OWNER, change)
        self.book.check()
        self.index.check()
        return changes

    def finds(self, tokens: Sequence[int], salt: bytes = SALT) -> Match:
        keys = unit_keys(np.array(tokens, "<u4").tobytes(), NS, salt)
        return self.index.match(keys, len(tokens)).get(OWNER) or Match()


def prompt(tokens: int, first: int = 7) -> list[int]:
    return [first + at for at in range(tokens)]


def test_what_vllm_packs_is_read():
    """Field by field, with hashes of both kinds; kinds of events and fields that we do not know are left out."""
    tokens = list(range(4))
    told = Stored([5, b"\x06" * 32], None, tokens, 2, None, "GPU", None, [("salt",), None], 0, "mamba", session_id="s")
    events = decode(batch(told, Novel("x"), Removed([5], "GPU", 0, "LOCAL"), Cleared()))
    stored, removed, cleared = events
    assert isinstance(stored, BlockStored) and isinstance(removed, BlockRemoved)
    assert cleared == AllBlocksCleared()
    assert (stored.block_hashes, stored.token_ids) == ((5, b"\x06" * 32), (0, 1, 2, 3))
    assert stored.extra_keys == (("salt",), None)
    assert (removed.block_hashes, removed.group_idx) == ((5,), 0)
    with pytest.raises(msgspec.MsgspecError):
        decode(b"no batch")


def test_a_prompt_is_found_as_far_as_the_server_has_it():
    """In whole units, however it was stored; each tenant finds its own, and prompts of others are nobody's."""
    server, text = Server(attention(16)), prompt(200)
    assert server.book.resumes_anywhere
    [change] = server.says(server.stored(text))
    assert change == Change(ChangeKind.KV_ADDED, unit_keys(np.array(text, "<u4").tobytes(), NS, SALT))
    assert server.finds(text).kv == 192
    assert server.finds(text, b"another").kv == 0
    other = prompt(128, 1000)
    assert not server.says(server.stored(other, salt=None), server.stored(other, salt="somebody's"))
    assert not server.says(server.stored(other, salt=alone("attempt")))
    assert len(server.book) == 12


def test_an_answer_is_added_block_by_block():
    """Nothing is said until a unit is full."""
    server, text = Server(attention(16)), prompt(256)
    server.says(server.stored(text[:96]))
    assert server.finds(text).kv == 64
    said = [server.says(server.stored(text[: 16 * (at + 1)], start=at)) for at in range(6, 16)]
    assert [len(changes) for changes in said] == [0, 1, 0, 0, 0, 1, 0, 0, 0, 1]
    assert server.finds(text).kv == 256


def test_what_goes_takes_with_it_what_stands_on_it_until_it_is_back():
    """vLLM may drop a block from the middle; both ways of prompts that part behind it are told of."""
    server = Server(attention(16))
    one, two = prompt(256), [*prompt(32), *prompt(224, 5000)]
    server.says(server.stored(one), server.stored(two))
    assert (server.finds(one).kv, server.finds(two).kv) == (256, 256)
    removed = server.says(server.removed(one, 1))
    assert [change.kind for change in removed] == [ChangeKind.KV_REMOVED] * 2
    assert {len(change.keys) for change in removed} == {KEY_BYTES}
    assert (server.finds(one).kv, server.finds(two).kv) == (0, 0)
    server.says(server.stored(one[:32], start=1))
    assert (server.finds(one).kv, server.finds(two).kv) == (256, 256)
    server.says(server.removed(one, 9))
    assert (server.finds(one).kv, server.finds(two).kv) == (128, 256)


def test_large_blocks_are_told_as_places_to_go_on_from():
    """A server of blocks of 128 tokens computes all of a block that differs at its end."""
    server, text = Server(attention(128)), prompt(512)
    server.says(server.stored(text))
    assert not server.book.resumes_anywhere
    assert server.finds(text) == Match(joint=512, kv=512)
    assert server.finds(text[:320]) == Match(joint=256, kv=320)


def test_a_model_with_states_goes_on_where_it_has_one():
    """The states of a span are told by hashes alone, before its rows or after them in the same batch."""
    server, text = Server(attention(64), recurrent(64)), prompt(512)
    server.says(server.state(text, 3), server.stored(text))
    assert server.finds(text) == Match(joint=256, kv=512)
    server.says(server.state(text, 7))
    assert server.finds(text) == Match(joint=512, kv=512)
    server.says(server.removed(text, 7, STATES))
    assert server.finds(text) == Match(joint=256, kv=512)
    server.says(server.removed(text, 2))
    assert server.finds(text) == Match(joint=0, kv=128)
    server.says(server.stored(text[: 3 * 64], start=2))
    assert server.finds(text) == Match(joint=256, kv=512)


def test_a_state_within_a_unit_is_not_told():
    """Which tokens follow within the unit the index cannot tell, so it promises nothing there."""
    server, text = Server(attention(48), recurrent(48)), prompt(48 * 8)
    server.says(server.stored(text), *(server.state(text, block) for block in range(8)))
    assert server.finds(text) == Match(joint=384, kv=384)
    assert server.finds(text[:320]) == Match(joint=192, kv=320)


def test_rows_count_when_every_group_has_them():
    server, text = Server(attention(16), attention(16, group=2, number=3)), prompt(128)
    assert not server.says(server.stored(text))
    assert len(server.says(server.stored(text, group=2))) == 1
    server.says(server.removed(text, 0, 2))
    assert server.finds(text).kv == 0


def test_a_server_that_names_no_group_has_one():
    server, text = Server(attention(16)), prompt(128)
    server.says(server.stored(text, group_idx=None))
    assert server.finds(text).kv == 128


@pytest.mark.parametrize("fields", [{"medium": "CPU"}, {"lora_name": "style", "lora_id": 1}, {"parent_block_hash": 12}])
def test_what_a_request_of_ours_would_not_find_is_not_told(fields: dict[str, Any]):
    """Offloaded blocks, those of an adapter, and blocks on others that nothing is known of."""
    server = Server(attention(16))
    assert not server.says(server.stored(prompt(128), **fields))
    assert len(server.book) == 0


def test_all_is_forgotten_at_once():
    server = Server(attention(16))
    server.says(server.stored(prompt(128)), server.stored(prompt(192, 300)))
    assert {change.kind for change in server.says(Cleared())} == {ChangeKind.KV_REMOVED}
    assert len(server.book) == 0
    assert server.index.runs_count == 0


def test_no_more_blocks_are_followed_than_there_is_room_for():
    server, text = Server(attention(16)), prompt(256)
    server.book = PrefixBook(NS, Geometry((attention(16),)), max_blocks=8)
    server.says(server.stored(text))
    assert server.finds(text).kv == 128
    server.says(server.removed(text, 7), server.stored(prompt(64, 9000)))
    assert server.finds(text).kv == 64


@pytest.mark.parametrize("seed", range(20))
def test_the_index_has_what_the_server_has(seed: int):
    """Whatever is stored and removed in whatever order: never more than the server holds, and all that is in units."""
    chance = random.Random(seed)
    server, held = Server(attention(16), recurrent(16)), dict[int, set[tuple[int, ...]]]({ROWS: set(), STATES: set()})
    texts = [prompt(256), [*prompt(40), *prompt(216, 900)], [*prompt(130), *prompt(126, 3000)]]
    for _ in range(200):
        text, block, group = chance.choice(texts), chance.randrange(16), chance.choice((ROWS, STATES))
        end = tuple(text[: (block + 1) * 16])
        before = block == 0 or tuple(text[: block * 16]) in held[ROWS]
        if chance.random() < 0.5:
            server.says(server.removed(text, block, group))
            held[group].discard(end)
        elif group == ROWS and before:
            server.says(server.stored(text[: (block + 1) * 16], start=block))
            held[group].add(end)
        elif group == STATES and end in held[ROWS]:
            server.says(server.state(text[: (block + 1) * 16], block))
            held[group].add(end)
    for text in texts:
        blocks = next((at for at in range(16) if tuple(text[: (at + 1) * 16]) not in held[ROWS]), 16)
        kv = blocks * 16 // HASH_UNIT_TOKENS * HASH_UNIT_TOKENS
        states = [at for at in range(64, kv + 1, 64) if tuple(text[:at]) in held[STATES]]
        assert server.finds(text) == Match(joint=max(states, default=0), kv=kv)


def test_a_salt_is_found_again_and_nothing_else_is():
    assert salt_in((cache_salt(SALT),)) == SALT
    for keys in (None, (), ("x",), (alone("a"),), (cache_salt(SALT), "adapter"), (("mm", 1),), ("prfaas:zz",)):
        assert salt_in(keys) is None
