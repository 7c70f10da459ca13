"""The index of one owner as changes from empty, read bit by bit while it goes on changing."""

from collections.abc import Iterator

from prfaas.cluster import NodeId
from prfaas.kvcache.prefix import Change, ChangeKind, PrefixIndex
from prfaas.kvcache.radix import Run, first_units


def pieces(index: PrefixIndex, owner: NodeId, piece_bytes: int) -> Iterator[tuple[Change, ...]]:
    """Of at most `piece_bytes` of keys each, and at least one change. What is there from the first piece to the last is
    in one of them: leaves go and shrink, but what is left of a leaf and its way from the root is found by it. What a
    piece tells is true when it is handed out."""
    leaves = [run for run in index.runs() if not run.children]
    seen: dict[int, Run] = {}
    piece: list[Change] = []
    nbytes = 0
    for leaf in leaves:
        for told in _leaf(leaf, seen):
            if piece and nbytes + len(told.keys) > piece_bytes:
                yield tuple(piece)
                piece, nbytes = [], 0
            change = _now(index, owner, told)
            if change is not None:
                piece.append(change)
                nbytes += len(change.keys)
    if piece:
        yield tuple(piece)


def _leaf(leaf: Run, seen: dict[int, Run]) -> Iterator[Change]:
    """The KV of the way to a leaf, and the states on it that no leaf before has told of.

    States are looked for only once the KV was told: of one that comes to be before, a change tells, which whoever lacks
    its KV drops."""
    if leaf.parent is None:
        return
    keys = leaf.path_keys(leaf.stop)
    yield Change(ChangeKind.KV_ADDED, keys)
    run: Run | None = leaf
    while run is not None and id(run) not in seen:
        seen[id(run)] = run
        for boundary in sorted(run.states):
            yield Change(ChangeKind.STATE_ADDED, first_units(keys, boundary))
        run = run.parent


def _now(index: PrefixIndex, owner: NodeId, told: Change) -> Change | None:
    """What of it is still so."""
    if told.kind is ChangeKind.KV_ADDED:
        held_units = index.find(told.keys, 0).kv_units(owner)
        return Change(told.kind, first_units(told.keys, held_units)) if held_units else None
    step = index.end(told.keys)
    return told if step is not None and owner in step.run.states.get(step.matched, {}) else None
