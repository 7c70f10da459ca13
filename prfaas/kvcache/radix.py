"""The tree under the prefix index: runs of hash units that end where prompts part (R4).

One object stands for a whole run, never for a unit. All positions are absolute, in units from the start of the prompt,
so that neither splitting a run nor joining two moves where a holder ends or where a state stands. A holder has a prefix
of the run, and all of the runs above it: nobody holds a prefix with a hole. What nobody holds is not in the tree, and
every run but the root is a leaf or branches.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Optional

from prfaas.cluster import NodeId
from prfaas.kvcache.hashing import KEY_BYTES


@dataclass(slots=True, eq=False)
class State:
    """The recurrent state of one holder at one boundary. It is proven once a prefill resumed from it, and counts that
    as a hit. `used` is the turn of the cache in which a prompt last passed it."""

    proven: bool
    hits: int = 1
    used: int = 0


@dataclass(slots=True, eq=False, repr=False)
class Run:
    """Units `start:stop` of some prompts. `holders` maps to where each one's KV ends, `states` from boundary to owner.

    A state at the boundary between two runs is the upper one's. `used` is the turn of the cache in which a prompt last
    came to the run's end.
    """

    parent: Optional["Run"]
    start: int
    keys: bytes
    children: dict[bytes, "Run"] = field(default_factory=dict)
    holders: dict[NodeId, int] = field(default_factory=dict)
    states: dict[int, dict[NodeId, State]] = field(default_factory=dict)
    used: int = 0

    @property
    def stop(self) -> int:
        return self.start + units(self.keys)

    @property
    def first_key(self) -> bytes:
        return self.keys[:KEY_BYTES]

    def unit_key(self, boundary: int) -> bytes:
        """The key of the unit of this run that ends at `boundary`."""
        stop = (boundary - self.start) * KEY_BYTES
        return self.keys[stop - KEY_BYTES : stop]

    def checkpoint_before(self, boundary: int) -> int | None:
        """The last boundary before `boundary` at which this run has a state."""
        return max((at for at in self.states if at < boundary), default=None)

    def path_keys(self, stop: int) -> bytes:
        """The keys of the whole prompt up to `stop`, which lies in this run."""
        parts = [first_units(self.keys, stop - self.start)]
        run = self.parent
        while run is not None:
            parts.append(run.keys)
            run = run.parent
        return b"".join(reversed(parts))


class Step(NamedTuple):
    """A run on the way along some keys, and the unit up to which it agrees with them."""

    run: Run
    matched: int


def units(keys: bytes) -> int:
    return len(keys) // KEY_BYTES


def first_units(keys: bytes, count: int) -> bytes:
    return keys[: count * KEY_BYTES]


@dataclass(slots=True)
class Size:
    """What a tree is made of: for each run one object, its units, an entry for each holder, and the states."""

    runs: int = 0
    units: int = 0
    holders: int = 0
    states: int = 0


class RadixTree:
    """Whoever changes the holders or the states of a run counts them in `size`."""

    def __init__(self) -> None:
        self.root = Run(None, 0, b"")
        self.size = Size()

    def runs(self) -> Iterator[Run]:
        """All runs but the root, each after its parent."""
        runs = list(self.root.children.values())
        for run in runs:
            runs.extend(run.children.values())
            yield run

    def walk(self, keys: bytes) -> list[Step]:
        """The runs that agree with `keys`, from the top. Only the last one may agree in part."""
        path, run, at = [], self.root, 0
        while child := run.children.get(keys[at : at + KEY_BYTES]):
            if not keys.startswith(child.keys, at):
                path.append(Step(child, child.start + _agreed_units(child.keys, keys, at)))
                break
            run, at = child, at + len(child.keys)
            path.append(Step(run, at // KEY_BYTES))
        return path

    def grow(self, keys: bytes) -> list[Step]:
        """The way along `keys`, which are all in the tree afterwards. The caller makes somebody hold them."""
        assert len(keys) % KEY_BYTES == 0, "keys are whole"
        path = self.walk(keys)
        run, matched = path[-1] if path else Step(self.root, 0)
        rest = keys[matched * KEY_BYTES :]
        if not rest:
            return path
        if matched < run.stop:
            run = self._split(run, matched)
            path[-1] = Step(run, matched)
        if run is self.root or run.children:
            child = run.children[rest[:KEY_BYTES]] = Run(run, matched, rest)
            self.size.runs += 1
            path.append(Step(child, child.stop))
        else:
            run.keys += rest
            path[-1] = Step(run, run.stop)
        self.size.units += units(rest)
        return path

    def trim(self, run: Run) -> None:
        """Take out of the tree what nobody holds of a run. Runs below it have been trimmed before."""
        if run.parent is None:
            return
        held = max(run.holders.values(), default=run.start)
        self.size.units -= run.stop - held
        if held == run.start:
            self._detach(run, run.parent)
        elif held < run.stop:
            assert not run.children, "someone holds a prefix with a hole"
            run.keys = first_units(run.keys, held - run.start)

    def check(self) -> None:
        size = Size()
        for run in self.runs():
            size.runs += 1
            size.units += run.stop - run.start
            size.holders += len(run.holders)
            size.states += sum(map(len, run.states.values()))
            where = f"run at {run.start}:{run.stop}"
            parent = run.parent
            assert parent is not None and parent.children[run.first_key] is run, f"{where} hangs on nothing"
            assert run.keys and len(run.keys) % KEY_BYTES == 0 and run.start == parent.stop, f"{where} has a gap"
            assert len(run.children) != 1, f"{where} and its only child are one run"
            assert max(run.holders.values(), default=0) == run.stop, f"{where} has units that nobody holds"
            for owner, stop in run.holders.items():
                assert run.start < stop <= run.stop, f"{where}: {owner} ends at {stop}"
                whole = parent is self.root or parent.holders.get(owner) == parent.stop
                assert whole, f"{where}: {owner} holds a prefix with a hole"
            for boundary, owners in run.states.items():
                assert owners and run.start < boundary <= run.stop, f"{where}: state at {boundary}"
                for owner in owners:
                    assert run.holders.get(owner, 0) >= boundary, f"{where}: {owner}'s state at {boundary} has no KV"
        assert size == self.size, f"the tree is {size}, {self.size} counted"

    def _split(self, run: Run, at: int) -> Run:
        """Cut a run in two; returns the new upper one. The lower one stays the same object."""
        parent = run.parent
        assert parent is not None
        upper = Run(parent, run.start, first_units(run.keys, at - run.start), {}, used=run.used)
        upper.holders = {owner: min(stop, at) for owner, stop in run.holders.items()}
        upper.states = {boundary: owners for boundary, owners in run.states.items() if boundary <= at}
        parent.children[upper.first_key] = upper
        self.size.runs += 1
        self.size.holders -= len(run.holders)
        run.parent, run.start, run.keys = upper, at, run.keys[len(upper.keys) :]
        run.holders = {owner: stop for owner, stop in run.holders.items() if stop > at}
        run.states = {boundary: owners for boundary, owners in run.states.items() if boundary > at}
        upper.children[run.first_key] = run
        self.size.holders += len(upper.holders) + len(run.holders)
        return upper

    def _detach(self, run: Run, parent: Run) -> None:
        assert not run.children, "someone holds a prefix with a hole"
        del parent.children[run.first_key]
        run.parent = None
        self.size.runs -= 1
        if parent is not self.root and len(parent.children) == 1:
            self._join(parent, next(iter(parent.children.values())))

    def _join(self, upper: Run, lower: Run) -> None:
        """Make two runs one where prompts no longer part. The lower one stays the same object."""
        assert upper.parent is not None
        self.size.runs -= 1
        self.size.holders -= len(upper.holders) + len(lower.holders)
        lower.keys, lower.start, lower.parent = upper.keys + lower.keys, upper.start, upper.parent
        lower.holders = upper.holders | lower.holders
        lower.states = upper.states | lower.states
        self.size.holders += len(lower.holders)
        lower.parent.children[lower.first_key] = lower
        upper.parent = None


def _agreed_units(run_keys: bytes, keys: bytes, at: int) -> int:
    """How many units of a run agree with `keys` from byte `at`, searched by halves."""
    low, high = 0, min(len(run_keys), len(keys) - at) // KEY_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        start, stop = low * KEY_BYTES, middle * KEY_BYTES
        if run_keys[start:stop] == keys[at + start : at + stop]:
            low = middle
        else:
            high = middle - 1
    return low
