"""Rows in and out of blocks, for backends that keep a block in any order."""

import pytest

torch = pytest.importorskip("torch")

from prfaas.engine.vllm.rows import Rows, block_order  # noqa: E402

TOKENS, HEADS, WIDTHS = 16, 2, (4, 4)
ROW = HEADS * sum(WIDTHS)
SHAPES = {"heads first": (HEADS, TOKENS, 8), "tokens first": (TOKENS, HEADS, 8), "padded": (HEADS, TOKENS, 9)}


def write(keys, values, block):
    """A backend that has heads before tokens and packs keys with the width outermost."""
    flat = block.view(-1)
    if block.shape[1:] == SHAPES["tokens first"]:
        block[0, :, :, :4], block[0, :, :, 4:] = keys, values
        return
    flat[: keys.numel()] = keys.permute(1, 2, 0).reshape(-1)
    flat[keys.numel() : 2 * keys.numel()] = values.permute(1, 0, 2).reshape(-1)


def _rows(shape, dtype):
    order = block_order(torch.Size(shape), dtype, TOKENS, HEADS, WIDTHS, write)
    return Rows(torch.zeros(6, *shape, dtype=dtype), order)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_rows_cross_between_orders(shape, dtype):
    """Rows that one server wrote are the rows that another one reads, whatever the order of their blocks, at any
    beginning and end within a block."""
    there, here = (_rows(each, dtype) for each in (shape, SHAPES["tokens first"]))
    rows = torch.randn(3 * TOKENS, ROW).to(dtype)
    there.write([4, 1, 3], 0, 20, rows[:20])
    there.write([4, 1, 3], 20, 45, rows[20:45])
    crossed = torch.empty(45, ROW, dtype=dtype)
    there.read([4, 1, 3], 0, 45, crossed)
    here.write([0, 5, 2], 0, 45, crossed)
    found = torch.empty(18, ROW, dtype=dtype)
    here.read([0, 5, 2], 13, 31, found)
    assert torch.equal(found, rows[13:31])


def test_the_order_is_what_the_backend_writes():
    """What a backend itself has written is read as all keys of a token, then all its values."""
    keys, values = torch.randn(TOKENS, HEADS, 4), torch.randn(TOKENS, HEADS, 4)
    cache = torch.zeros(1, *SHAPES["heads first"])
    write(keys, values, cache)
    order = block_order(cache.shape[1:], torch.float32, TOKENS, HEADS, WIDTHS, write)
    found = torch.empty(TOKENS, ROW)
    Rows(cache, order).read([0], 0, TOKENS, found)
    assert torch.equal(found, torch.cat([keys.flatten(1), values.flatten(1)], dim=1))


def test_a_backend_that_loses_something_is_refused():
    def forgets(keys, values, block):
        block.view(-1)[: keys.numel()] = keys.reshape(-1)

    with pytest.raises(ValueError, match="does not keep"):
        block_order(torch.Size(SHAPES["heads first"]), torch.float32, TOKENS, HEADS, WIDTHS, forgets)
