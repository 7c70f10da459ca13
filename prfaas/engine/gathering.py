"""The pieces that a sequence is restored from, tensor by tensor, once it is sure that nothing is missing: a hole would
be taken for rows, and the answer would be wrong without a word."""

from collections.abc import Iterable

from prfaas.kvcache.layout import KvLayout, Part, TensorKind

#: (layer, tensor)
Place = tuple[int, int]
Pieces = list[tuple[Part, memoryview]]


def gather(layout: KvLayout, tokens: int, parts: Iterable[tuple[Part, memoryview]]) -> dict[Place, Pieces]:
    """Of each tensor its pieces, in order. Raises ValueError unless they are, of every token tensor, the rows 0:tokens
    following each other, and every state once, as it is at `tokens`."""
    if not tokens:
        return {}
    pieces: dict[Place, Pieces] = {
        (layer, number): [] for layer, tensors in enumerate(layout.layers) for number in range(len(tensors))
    }
    for part, memory in parts:
        pieces[part.layer, part.tensor].append((part, memory))
    for (layer, number), found in pieces.items():
        tensor, reached = layout.layers[layer][number], 0
        for part, memory in found:
            rows = part.stop - part.start if tensor.kind is TensorKind.TOKENS else 1
            if part.start != reached or memory.nbytes != rows * tensor.nbytes:
                raise ValueError(f"{tensor.name} of layer {layer} goes on at {part.start} after {reached}")
            reached = part.stop
        if reached != tokens:
            raise ValueError(f"{tensor.name} of layer {layer} has {reached} of {tokens} tokens")
    return pieces
