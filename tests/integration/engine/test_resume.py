"""Real models that begin with cached blocks and a state say what they say from nothing: both hybrid families, with
experts, and a dense model, whose windows have no states."""

import pytest

from prfaas.engine.hf import HfEngine
from prfaas.engine.messages import Cancel, Decode, Export, Exported, Finished, Prefill, RowsReady
from prfaas.kvcache.layout import Extent, TensorKind, Window
from tests.integration.engine.desk import UNIT, Cached, Desk, drawn, same
from tests.integration.engine.engine_scenes import packed, prompt

STEPS = 24
#: Within a chunk, at its end, and the last ones below the lengths tested.
BOUNDARIES = (64, 192, 256, 448, 512, 576)
IDS = prompt(701, seed=21)


@pytest.fixture(scope="module")
def desk(engine: HfEngine) -> Desk:
    return Desk(engine)


@pytest.fixture(scope="module")
def cached(desk: Desk) -> Cached:
    """Of a prompt whose first 700 tokens are those of all others here."""
    return Cached(desk, IDS, BOUNDARIES)


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_a_prefill_resumes_at_any_boundary(desk: Desk, cached: Cached, boundary: int) -> None:
    assert same(desk.cold(IDS, STEPS), desk.warm(IDS, cached.held(boundary), STEPS))


@pytest.mark.parametrize("length", [511, 512, 513, 577])
def test_lengths_around_a_chunk_and_a_block_resume_at_the_last_boundary(
    desk: Desk, cached: Cached, length: int
) -> None:
    """Of N tokens N-1 are prefilled: where that is a boundary there is nothing left to compute, and the state is the
    one at N-1 and not at N."""
    ids = IDS[:length]
    boundary = max(at for at in BOUNDARIES if at <= length - 1)
    assert same(desk.cold(ids, STEPS), desk.warm(ids, cached.held(boundary), STEPS))


@pytest.mark.parametrize("stop", [511, 512, 513])
@pytest.mark.parametrize("first", [192, 448, 510])
def test_a_hand_off_sends_on_what_was_cached_and_what_was_not(
    desk: Desk, cached: Cached, first: int, stop: int
) -> None:
    """Rows below the boundary come from the blocks and are announced first. Decode, which has the first rows itself,
    says what a cold run says."""
    out = desk.place(first, stop, state=True)
    prefix = desk.place(0, first)
    said = desk.do(desk.resumed("a", IDS[: stop + 1], stop, cached.held(448), out))
    announced = [event.stop for event in said if isinstance(event, RowsReady)]
    assert announced == sorted(announced) and announced[-1] == stop
    assert (448 in announced) == (first < 448)
    desk.do(desk.prefill("b", IDS, 700), Export("b", (prefix,)), Cancel("b"))
    decode = Decode(
        attempt="c", prompt=packed(IDS[: stop + 1]), tokens=stop, max_tokens=STEPS, held=(prefix, out), top_logits=8
    )
    assert same(desk.cold(IDS[: stop + 1], STEPS), drawn(desk.do(decode)))


def test_a_prompt_beyond_the_periodic_boundary_resumes_there(engine: HfEngine) -> None:
    """8192 tokens out of 128 blocks, of the run that it is compared with."""
    desk, ids = Desk(engine), prompt(8221, seed=22)
    held = (*(desk.place(at, at + UNIT) for at in range(0, 8192, UNIT)), desk.place(8192, 8192, state=True))
    desk.do(desk.prefill("a", ids, 8220, (8192,)), Export("a", held))
    assert same(drawn(desk.do(desk.decode("a", ids, STEPS))), desk.warm(ids, held, STEPS))


def test_any_lost_window_changes_what_is_said(engine: HfEngine) -> None:
    """So that being the same means something: each block and each tensor of the state, zeroed."""
    desk, ids = Desk(engine), IDS[:401]
    held = Cached(desk, ids, (320,)).held(320)
    cold = desk.cold(ids, STEPS)
    assert same(cold, desk.warm(ids, held, STEPS))
    for window in held:
        region = desk.region(window)
        kept = bytes(region)
        region[:] = bytes(len(kept))
        changed = not same(cold, desk.warm(ids, held, STEPS))
        region[:] = kept
        assert changed == bool(kept), f"{window} is lost, and nobody notices"


def test_a_lost_state_tensor_changes_what_is_said(engine: HfEngine) -> None:
    """Conv states beside recurrent ones: each layer's is used. The dense model has none."""
    desk, ids = Desk(engine), IDS[:401]
    held = Cached(desk, ids, (320,)).held(320)
    cold, at = desk.cold(ids, STEPS), held[-1].offset
    for layer, tensors in enumerate(engine.info.layout.layers):
        for tensor in (each for each in tensors if each.kind is TensorKind.STATE):
            kept = bytes(desk.pool[at : at + tensor.nbytes])
            desk.pool[at : at + tensor.nbytes] = bytes(tensor.nbytes)
            assert not same(cold, desk.warm(ids, held, STEPS)), f"{tensor.name} of layer {layer}"
            desk.pool[at : at + tensor.nbytes] = kept
            at += -(-tensor.nbytes // 64) * 64


@pytest.mark.parametrize("boundary", [192, 256, 700])
def test_a_snapshot_is_the_state_of_a_prefill_that_ends_there(desk: Desk, boundary: int) -> None:
    """Bit for bit, with the rows up to there, though the sequence went on and overwrote its own."""
    ours, theirs = desk.place(0, boundary, state=True), desk.place(0, boundary, state=True)
    cold = desk.prefill("a", IDS, boundary)
    desk.do(Prefill(attempt="a", prompt=cold.prompt, stop=boundary, ends=cold.ends, out=theirs))
    desk.do(desk.prefill("b", IDS, 700, (boundary,)), desk.decode("b", IDS, STEPS, linger=True))
    assert Exported("b") in desk.do(Export("b", (ours,)), Cancel("b"))
    assert desk.region(ours) == desk.region(theirs)


def test_blocks_and_states_are_not_touched_by_who_began_with_them(desk: Desk, cached: Cached) -> None:
    """Restored by copy: prefill and decode go on in place, the pool keeps what it had, a second one begins alike."""
    before = bytes(desk.pool)
    once = desk.warm(IDS, cached.held(448), STEPS)
    assert bytes(desk.pool) == before
    assert desk.warm(IDS, cached.held(448), STEPS) == once


def test_what_was_restored_is_exported_as_it_came(desk: Desk, cached: Cached) -> None:
    """Whatever the blocks were before, also across their edges."""
    held, copy = cached.held(448), desk.place(0, 448)
    desk.do(desk.resumed("a", IDS, 700, held), Export("a", (copy,)))
    again = [desk.place(window.first, window.stop) for window in held[:-1]]
    desk.do(Export("a", tuple(again)), Cancel("a"))
    for window, other in zip(held[:-1], again, strict=True):
        assert desk.region(window) == desk.region(other)
    assert same(desk.cold(IDS, STEPS), desk.warm(IDS, (copy, held[-1]), STEPS))


def test_the_next_turn_resumes_past_the_answer(desk: Desk) -> None:
    """From the moving snapshot and the rows of the answer, which decode computed one by one."""
    ids = prompt(300, seed=23)
    said = desk.do(desk.prefill("a", ids, 299), desk.decode("a", ids, 100, snapshot_tokens=UNIT, linger=True))
    answer = [token for token, _ in drawn(said)]
    (finished,) = [event for event in said if isinstance(event, Finished)]
    assert (finished.kept_tokens, finished.snapshots) == (399, (384,))
    rows, state = desk.place(0, 384), desk.place(384, 384, state=True)
    assert Exported("a") in desk.do(Export("a", (rows, state)), Cancel("a"))
    turn = [*ids, *answer, *prompt(150, seed=24)]
    assert same(desk.cold(turn, STEPS), desk.warm(turn, (rows, state), STEPS))
    edited = [*ids, *answer[:10], answer[10] ^ 1, *answer[11:], *prompt(150, seed=24)]
    assert not same(desk.cold(edited, STEPS), desk.warm(edited, (rows, state), STEPS)), "another history is no match"


def test_an_export_while_decode_goes_on_changes_nothing(desk: Desk) -> None:
    """Neither the answer, bit for bit, with snapshots being taken as well, nor any row that was exported earlier."""
    ids = prompt(300, seed=25)
    plain = desk.cold(ids, STEPS)
    desk.do(desk.prefill("a", ids, 299, (256,)))
    said, windows = len(desk.events), list[Window]()
    desk.loop.handle(desk.decode("a", ids, STEPS, snapshot_tokens=8, linger=True))
    for count in range(STEPS // 2):
        windows.append(desk.place(0, 256 + count, state=count == 0))
        desk.loop.handle(Export("a", (windows[-1],)))
        desk.loop.turn()
    whole = desk.place(0, 299 + STEPS)
    while desk.loop.turn():
        desk.loop.check()
    assert drawn(desk.events[said:]) == plain
    assert desk.events[said:].count(Exported("a")) == STEPS // 2
    desk.do(Export("a", (whole,)), Cancel("a"))
    for window in windows:
        assert rows_of(desk, window, window.stop) == rows_of(desk, whole, window.stop)
    assert same(plain, desk.warm(ids, (windows[0],), STEPS))


def rows_of(desk: Desk, window: Window, stop: int) -> list[bytes]:
    """Its rows up to `stop`, tensor by tensor."""
    parts = desk.layout.extent_parts(Extent(0, stop), (stop,), (window,))
    return [bytes(desk.pool[part.offset : part.offset + part.nbytes]) for part in parts]
