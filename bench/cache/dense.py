"""The obvious cache of a hybrid model, to compare with: a state at every block, and what was used longest ago goes."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple


class _Item(NamedTuple):
    """The KV of a block, or the state at its end."""

    state: bool
    block: int


class DenseLru:
    """Equal ids of blocks mean equal prefixes. KV goes no later than what lies behind it: there are no holes."""

    def __init__(self, capacity_bytes: int, state_bytes: int, block_bytes: int) -> None:
        self._room_bytes = capacity_bytes
        self._nbytes = {True: state_bytes, False: block_bytes}
        self._items: OrderedDict[_Item, None] = OrderedDict()
        self.states = self.evictions = 0

    def serve(self, blocks: Sequence[int], usable: int) -> int:
        """How many of the first `usable` blocks of a prompt need not be computed. All are there afterwards, or as many
        as fit."""
        kv = next((at for at, block in enumerate(blocks) if _Item(False, block) not in self._items), len(blocks))
        resumable = range(min(kv, usable), 0, -1)
        joint = next((at for at in resumable if _Item(True, blocks[at - 1]) in self._items), 0)
        for block in reversed(blocks):
            for item in (_Item(True, block), _Item(False, block)):
                if item not in self._items:
                    self._room_bytes -= self._nbytes[item.state]
                    self.states += item.state
                self._items[item] = None
                self._items.move_to_end(item)
        while self._room_bytes < 0:
            item, _ = self._items.popitem(last=False)
            self._room_bytes += self._nbytes[item.state]
            self.states -= item.state
            self.evictions += 1
        return joint
