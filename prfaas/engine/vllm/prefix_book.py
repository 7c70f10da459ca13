"""What a vLLM server's own prefix cache holds, in our keys: its events in, changes of an index out (R4).

vLLM names a prefix by a hash of its own, so that for each of its blocks the place in our chain of keys is kept here. A
block counts when all attention groups hold it and all before it. A model with recurrent layers can go on only where all
its state groups hold a state, and any model only where a block of vLLM's ends: where that is not at every unit of ours,
such places are told as states. What cannot be told exactly is not told: the index may know too little, and never too
much. Of a block that vLLM has twice it says that it is removed when the first one goes.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from prfaas.engine.vllm.cache_salt import salt_in
from prfaas.engine.vllm.geometry import Geometry
from prfaas.engine.vllm.kv_events import OWN_MEDIUM, AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, KvEvent
from prfaas.engine.vllm.prefix_block import Block
from prfaas.kvcache.hashing import HASH_UNIT_TOKENS, root_key
from prfaas.kvcache.placement import PROMPT_UNITS
from prfaas.kvcache.prefix import Change, ChangeKind
from prfaas.request import TOKEN_BYTES

#: More are not followed; each takes about half a kilobyte here.
MAX_BLOCKS = 1 << 20
#: No index is told of longer prompts.
_PROMPT_TOKENS = PROMPT_UNITS * HASH_UNIT_TOKENS


class PrefixBook:
    """`namespace` and geometry are the server's. Events are taken in the order in which they were published."""

    def __init__(self, namespace: str, geometry: Geometry, max_blocks: int = MAX_BLOCKS) -> None:
        self._namespace, self._max_blocks = namespace, max_blocks
        self._rows = frozenset(layer.group for layer in geometry.layers if layer.grows)
        self._states = frozenset(layer.group for layer in geometry.layers if not layer.grows)
        sizes = {layer.block_tokens for layer in geometry.layers if layer.grows}
        #: Whether a prefill can go on at every unit that is held.
        self.resumes_anywhere = not self._states and all(HASH_UNIT_TOKENS % size == 0 for size in sizes)
        self._roots: dict[bytes, Block] = {}
        self._blocks: dict[BlockHash, Block] = {}
        #: States, by the hashes of blocks that nobody has told of yet: rows come in the same batch, before or after.
        self._early: dict[BlockHash, set[int]] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def take(self, events: Sequence[KvEvent]) -> list[Change]:
        """One batch."""
        changes: list[Change] = []
        for event in events:
            match event:
                case BlockStored():
                    changes += self._stored(event)
                case BlockRemoved():
                    changes += self._removed(event)
                case AllBlocksCleared():
                    changes += self.clear()
        self._early.clear()
        return changes

    def clear(self) -> list[Change]:
        """Nothing is known any more."""
        changes = [change for root in self._roots.values() for each in root.children.values() for change in _lost(each)]
        self._roots.clear()
        self._blocks.clear()
        self._early.clear()
        return changes

    def check(self) -> None:
        assert len(self._blocks) <= self._max_blocks, "more blocks than were to be followed"
        for name, block in self._blocks.items():
            assert block.parent is not None and block.parent.children[name] is block, "a block that hangs on nothing"
            assert block.groups or block.children, "a block that nobody holds"
            assert block.whole == self._holds(block), "the index was told something else"
            assert not block.stated or (block.whole and self._states <= block.groups), "a state that is not there"
        assert all(root.children for root in self._roots.values()), "a tenant without a block"

    def _stored(self, event: BlockStored) -> list[Change]:
        group = self._group(event.group_idx)
        if group is None or event.medium not in (None, OWN_MEDIUM) or event.lora_name is not None:
            return []
        if group in self._states:
            return [change for name in event.block_hashes for change in self._state_stored(name, group)]
        spaced = len(event.block_hashes) * event.block_size != len(event.token_ids)
        return [] if spaced or group not in self._rows else self._rows_stored(event, group)

    def _group(self, number: int | None) -> int | None:
        """Servers that do not say which group have one."""
        groups = self._rows | self._states
        return next(iter(groups)) if number is None and len(groups) == 1 else number

    def _rows_stored(self, event: BlockStored, group: int) -> list[Change]:
        parent, size = self._parent(event), event.block_size * TOKEN_BYTES
        tokens, blocks = np.array(event.token_ids, "<u4").tobytes(), list[Block]()
        for number, name in enumerate(event.block_hashes):
            block = self._blocks.get(name)
            if block is None:
                if parent is None or not self._has_room(parent, event.block_size):
                    break
                block = self._blocks[name] = parent.add(name, tokens[number * size : (number + 1) * size])
            block.groups |= {group} | self._early.pop(name, set())
            blocks.append(block)
            parent = block
        self._tidy(parent)
        return [change for block in blocks if not block.whole for change in self._gained(block)]

    def _has_room(self, parent: Block, tokens: int) -> bool:
        return len(self._blocks) < self._max_blocks and parent.stop + tokens <= _PROMPT_TOKENS

    def _parent(self, event: BlockStored) -> Block | None:
        """What the first of the blocks stands on; None where that is not ours to follow."""
        if event.parent_block_hash is not None:
            return self._blocks.get(event.parent_block_hash)
        salt = salt_in(event.extra_keys[0] if event.extra_keys else None)
        if salt is None:
            return None
        if salt not in self._roots:
            self._roots[salt] = Block.root(salt, root_key(self._namespace, salt))
        return self._roots[salt]

    def _holds(self, block: Block) -> bool:
        return block.parent is not None and block.parent.whole and self._rows <= block.groups

    def _gained(self, block: Block) -> list[Change]:
        """It may be whole now, and so may what stands on it. Of what follows on each other the last is told, so that
        the keys of a prompt are not repeated for each of its blocks."""
        gained = [block] if self._holds(block) else []
        for each in gained:
            each.whole = True
            gained.extend(child for child in each.children.values() if self._holds(child))
        told, changes = set[int](), list[Change]()
        for each in reversed(gained):
            if each.keys and id(each) not in told:
                changes.append(Change(ChangeKind.KV_ADDED, each.path_keys))
            if each.keys or id(each) in told:
                told.add(id(each.parent))
        return changes + [change for each in gained for change in self._state_told(each)]

    def _state_stored(self, name: BlockHash, group: int) -> list[Change]:
        block = self._blocks.get(name)
        if block is not None:
            block.groups.add(group)
            return self._state_told(block)
        if len(self._early) < self._max_blocks:
            self._early.setdefault(name, set()).add(group)
        return []

    def _state_told(self, block: Block) -> list[Change]:
        """Where a prefill can go on, if that is the end of one of our units as well."""
        if self.resumes_anywhere or block.stated or not block.whole or block.tail or not self._states <= block.groups:
            return []
        block.stated = True
        return [Change(ChangeKind.STATE_ADDED, block.path_keys)]

    def _removed(self, event: BlockRemoved) -> list[Change]:
        group, changes = self._group(event.group_idx), list[Change]()
        if group is None or event.medium not in (None, OWN_MEDIUM):
            return []
        for name in event.block_hashes:
            self._early.get(name, set()).discard(group)
            block = self._blocks.get(name)
            if block is None:
                continue
            block.groups.discard(group)
            if group in self._rows:
                changes += _lost(block)
            elif block.stated:
                block.stated = False
                changes.append(Change(ChangeKind.STATE_REMOVED, block.path_keys))
            self._tidy(block)
        return changes

    def _tidy(self, block: Block | None) -> None:
        """Away with what nobody holds, and nothing stands on."""
        while block is not None and not block.groups and not block.children:
            if block.parent is None:
                del self._roots[block.salt]
                return
            del block.parent.children[block.name], self._blocks[block.name]
            block = block.parent


def _lost(block: Block) -> Iterator[Change]:
    """It is whole no more, nor what stands on it. Told is the first unit that is gone, on each branch."""
    waiting = [(block, False)]
    while waiting:
        each, told = waiting.pop()
        if not each.whole:
            continue
        each.whole = each.stated = False
        if each.keys and not told:
            yield Change(ChangeKind.KV_REMOVED, each.first_path_keys)
            told = True
        waiting.extend((child, told) for child in each.children.values())
