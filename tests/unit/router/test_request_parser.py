"""Bytes to requests, whatever the bytes and however they come."""

from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.router.http.limits import Limits
from services.router.http.messages import HttpRequest, Response
from services.router.http.parser import Continue, Item, Phase, RequestParser

LIMITS = Limits(max_head_bytes=2000, max_headers=20, max_body_bytes=1000)

GET = b"GET /a%20b?q=1 HTTP/1.1\r\nHost: x\r\nX-A: 1\r\nx-a: 2\r\n\r\n"
POST = b"POST /p HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = (
    b"POST /c HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"3;ext=1\r\nabc\r\n2\r\nde\r\n0\r\nTrailer: t\r\n\r\n"
)
UPGRADE = (
    b"POST /u HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
    b"Content-Length: 4\r\n\r\nbody"
)
EXPECT = b"PUT /e HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\nok"
OLD = b"GET /old HTTP/1.0\r\n\r\n"
VALID = [GET, POST, CHUNKED, UPGRADE, EXPECT]


def parser() -> RequestParser:
    return RequestParser(LIMITS, now=lambda: 0.0)


def parse(*datas: bytes) -> list[Item]:
    one = parser()
    return [item for data in datas for item in one.feed(data, room=100)]


def told(items: list[Item]) -> list[object]:
    """Items as plain values; of a refusal, the status."""
    return [
        item.status if isinstance(item, Response) else "100" if isinstance(item, Continue) else item for item in items
    ]


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    borders = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[start:end] for start, end in pairwise(borders)]


def only_request(*datas: bytes) -> HttpRequest:
    [request] = [item for item in parse(*datas) if not isinstance(item, Continue)]
    assert isinstance(request, HttpRequest)
    return request


CUTS = st.lists(st.integers(0, 2000), max_size=20)


@given(messages=st.lists(st.sampled_from(VALID), max_size=6), cuts=CUTS)
@settings(max_examples=300)
def test_requests_do_not_depend_on_how_their_bytes_come(messages: list[bytes], cuts: list[int]):
    """Pipelined requests of every kind, cut anywhere, are the same requests in the same order."""
    expected = [item for message in messages for item in told(parse(message))]
    assert told(parse(*split(b"".join(messages), cuts))) == expected


@given(
    messages=st.lists(st.one_of(st.sampled_from(VALID), st.binary(max_size=40)), max_size=5),
    damage=st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), max_size=4),
    cuts=CUTS,
)
@example(messages=[UPGRADE] * 5, damage=[], cuts=[])
@settings(max_examples=500)
def test_no_bytes_break_the_parser(messages: list[bytes], damage: list[tuple[int, int]], cuts: list[int]):
    """Damaged input gives requests, then at most one refusal, then nothing; the same for any cuts."""
    data = bytearray(b"".join(messages))
    for place, value in damage:
        if data:
            data[place % len(data)] = value
    items = parse(bytes(data))
    refusals = [index for index, item in enumerate(items) if isinstance(item, Response)]
    assert refusals in ([], [len(items) - 1])
    assert told(parse(*split(bytes(data), cuts))) == told(items)


def test_a_request_is_what_was_sent():
    """Path without query and escapes, lower-case headers, repeated ones joined, body whole."""
    get = only_request(GET)
    assert (get.method, get.path, get.headers["x-a"], get.body) == ("GET", "/a b", "1, 2", b"")
    assert only_request(CHUNKED).body == b"abcde"
    assert "trailer" not in only_request(CHUNKED).headers


def test_white_space_around_a_value_is_not_part_of_it():
    request = only_request(b"GET / HTTP/1.1\r\nHost:x\r\nX-A: \t 5000 \t \r\n\r\n")
    assert (request.headers["host"], request.headers["x-a"]) == ("x", "5000")


def test_an_offer_to_upgrade_is_passed_over():
    """Java's client makes one with its first request; its body must still arrive."""
    request = only_request(UPGRADE)
    assert (request.path, request.body, request.keep_alive) == ("/u", b"body", True)


def test_whether_the_connection_stays_open():
    """HTTP/1.1 unless told otherwise; HTTP/1.0 only when asked."""
    assert only_request(GET).keep_alive
    assert not only_request(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").keep_alive
    assert not only_request(OLD).keep_alive
    assert only_request(b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n").keep_alive


def test_an_absolute_target_means_its_path():
    """As clients send to a proxy."""
    assert only_request(b"GET http://h:80/v1/models?x HTTP/1.1\r\nHost: h\r\n\r\n").path == "/v1/models"
    assert only_request(b"GET http://h HTTP/1.1\r\nHost: h\r\n\r\n").path == "/"


HEAD = b"POST / HTTP/1.1\r\nHost: x\r\n"


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"\x16\x03\x01\x02\x00", 400),
        (b"nonsense\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/2.0\r\nHost: x\r\n\r\n", 505),
        (b"GET /\r\n\r\n", 505),
        (b"CONNECT x:443 HTTP/1.1\r\nHost: x\r\n\r\n", 405),
        (HEAD + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n", 400),
        (HEAD + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\n", 400),
        (HEAD + b"Content-Length: -1\r\n\r\n", 400),
        (HEAD + b"Content-Length: 99999999999999999999999\r\n\r\n", 400),
        (HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n", 501),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n", 400),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n", 400),
        (HEAD + b"X: a\r\n b\r\n\r\n", 400),
        (HEAD + b"X: \0\r\n\r\n", 400),
        (HEAD + b"X y: a\r\n\r\n", 400),
        (HEAD + b"Expect: magic\r\n\r\n", 417),
        (HEAD + b"Content-Length: 1001\r\n\r\n", 413),
        (
            HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"64\r\n" + b"x" * 100 + b"\r\n" + b"3e7\r\n" + b"x" * 999,
            413,
        ),
        (HEAD + b"X: " + b"x" * 3000 + b"\r\n\r\n", 431),
        (HEAD + b"X: " + b"x" * 3000, 431),
        (HEAD + b"X: y\r\n" * 21 + b"\r\n", 431),
        (b"GET /" + b"x" * 3000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 431),
        (b"\r\n" * 3000, 431),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\nT: " + b"x" * 3000, 431),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\n" + b"T: x\r\n" * 500, 431),
    ],
)
@pytest.mark.parametrize("step", [1, 100_000])
def test_what_is_refused(data: bytes, status: int, step: int):
    """With its status, in one piece or byte by byte, and nothing that follows is parsed."""
    datas = [data[start : start + step] for start in range(0, len(data), step)]
    assert told(parse(*datas, GET)) == [status]


def test_a_chunk_extension_without_end_is_refused():
    """It is part of no header and no body, but costs time all the same."""
    pieces = [b"x" * 100] * 30
    assert told(parse(HEAD + b"Transfer-Encoding: chunked\r\n\r\n1;", *pieces)) == [431]


def test_chunk_extensions_are_bounded_together():
    """However short each is. Chunks of one byte are nobody's fault."""
    head, piece = HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1;" + b"x" * 100 + b"\r\na\r\n"
    assert told(parse(head, *[piece] * 100)) == [431]
    plain = parse(head, *[b"1\r\na\r\n"] * 1000, b"0\r\n\r\n")
    assert [item.body for item in plain if isinstance(item, HttpRequest)] == [b"a" * 1000]


def test_a_body_that_is_too_large_is_refused_before_it_is_sent():
    """The client waits for `100 Continue` and gets 413."""
    assert told(parse(HEAD + b"Expect: 100-continue\r\nContent-Length: 1001\r\n\r\n")) == [413]


def test_no_more_requests_are_taken_than_there_is_room_for():
    """One byte of the next is one too many."""
    one = parser()
    assert len(one.feed(GET * 2, room=2)) == 2
    assert told(one.feed(GET * 5, room=2))[2:] == [503]


def test_the_phase_says_what_is_awaited():
    """So that each part of a request can have its own time limit."""
    one, phases = parser(), []
    for data in (b"", b"POST / HT", b"TP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n", b"a", b"b", b"G", b"\0"):
        one.feed(data, room=9)
        phases.append(one.phase)
    assert phases == [Phase.IDLE, Phase.HEAD, Phase.BODY, Phase.BODY, Phase.IDLE, Phase.HEAD, Phase.OVER]
