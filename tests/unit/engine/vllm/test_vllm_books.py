"""The books of the connector: what is loaded and saved, and that nothing is twice or missing."""

from hypothesis import given
from hypothesis import strategies as st

from prfaas.engine.vllm.books import Begin, Books, Load, Save, Scheduled
from prfaas.engine.vllm.wish import Wish


def test_a_load_is_ordered_once_and_stops_one_token_short():
    """The last token of a prompt is computed, whatever is held; a request that is asked for again loads nothing."""
    books = Books()
    books.add("r", Wish("a", load=10), prompt_tokens=10)
    assert books.loadable("r", computed=0) == 9
    assert books.loadable("r", computed=4) == 5
    books.allocated("r", ((7, 8), (3,)), external=5)
    assert books.loadable("r", computed=0) == 0
    assert books.step(()).loads == [Load("r", "a", ([7, 8], [3]), 4, 9)]
    assert books.step(()).loads == []


def test_a_request_that_waits_for_blocks_may_ask_again():
    books = Books()
    books.add("r", Wish("a", load=9), prompt_tokens=10)
    books.allocated("r", ((),), external=0)
    assert books.loadable("r", computed=0) == 9


def test_nothing_is_loaded_once_a_request_has_begun():
    """The server had all of it in its own cache; preempted, it has not. What was held has been given up meanwhile."""
    books = Books()
    books.add("r", Wish("a", load=9), prompt_tokens=10)
    assert books.loadable("r", computed=9) == 0
    assert books.step([Scheduled("r", [[1]], True, computed=9, scheduled=1)]).begins == [Begin("a", 9)]
    assert books.loadable("r", computed=0) == 0


def test_blocks_that_fit_no_group_raise_nothing():
    """An error in a server's scheduler would end the server."""
    books = Books()
    books.add("r", Wish("a", save=True), prompt_tokens=10)
    books.step([Scheduled("r", [[1]], True, computed=0, scheduled=5)])
    [save] = books.step([Scheduled("r", [[2], [3]], False, computed=5, scheduled=5)]).saves
    assert save.blocks == ((1, 2),)


def test_who_wants_nothing_is_left_alone():
    books = Books()
    assert books.loadable("r", computed=0) == 0
    books.allocated("r", ((1,),), external=3)
    orders = books.step([Scheduled("r", [[1]], True, 0, 10)])
    assert not (orders.loads or orders.begins or orders.saves)


def test_a_prompt_is_saved_chunk_by_chunk():
    """Also what the server's own prefix cache had before the first chunk; tokens that are drawn are not saved."""
    books = Books()
    books.add("r", Wish("a", save=True), prompt_tokens=10)
    first = books.step([Scheduled("r", [[1], [9]], True, computed=2, scheduled=3)])
    assert first.begins == [Begin("a", 2)]
    assert first.saves == [Save("a", ((1,), (9,)), 0, 5, False)]
    second = books.step([Scheduled("r", [[2], []], False, computed=5, scheduled=5)])
    assert second.begins == []
    assert second.saves == [Save("a", ((1, 2), (9,)), 5, 10, True)]
    assert books.step([Scheduled("r", None, False, computed=10, scheduled=1)]).saves == []
    books.finished("r")
    books.finished("r")
    assert len(books) == 0


@given(chunks=st.lists(st.integers(1, 7), min_size=1, max_size=8), preempted=st.integers(0, 7))
def test_preempted_or_not_each_token_is_saved_once_in_order(chunks: list[int], preempted: int):
    """What was sent must not be written again: the other side may have it already."""
    prompt_tokens = sum(chunks)
    books = Books()
    books.add("r", Wish("a", save=True), prompt_tokens)
    saves: list[Save] = []
    schedule = chunks[:preempted]
    for run in [schedule, chunks] if len(schedule) < len(chunks) else [chunks]:
        computed = 0
        for number, chunk in enumerate(run):
            orders = books.step([Scheduled("r", [[number]], number == 0, computed, chunk)])
            computed += chunk
            saves += orders.saves
            assert all(save.blocks == (tuple(range(number + 1)),) for save in orders.saves)
    ends = [0, *(save.stop for save in saves)]
    assert [save.start for save in saves] == ends[:-1]
    assert ends[-1] == prompt_tokens
    assert [save.last for save in saves] == [False] * (len(saves) - 1) + [True]
