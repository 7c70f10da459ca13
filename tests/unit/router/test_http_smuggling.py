"""Requests that two servers in a row could take for different ones: refused, or read as exactly one.

Behind a proxy on one connection come the requests of many clients. Whoever makes us see another border between them
than the proxy does puts words into the next client's mouth.
"""

import pytest

from services.router.http.limits import Limits
from services.router.http.messages import HttpRequest, Response
from services.router.http.parser import Item, RequestParser

POST = b"POST /a HTTP/1.1\r\nHost: x\r\n"
LENGTH = POST + b"Content-Length: 3\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n"
END = b"\r\n0\r\n\r\n"


def parse(data: bytes, step: int) -> list[Item]:
    parser, items = RequestParser(Limits(), now=lambda: 0.0), list[Item]()
    for start in range(0, len(data), step):
        items += parser.feed(data[start : start + step], room=100)
    return items


REFUSED = {
    "CL.TE": POST + b"Content-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nX",
    "TE.CL": POST + b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n5c\r\n",
    "CL.TE, identity": LENGTH + b"Transfer-Encoding: identity\r\n\r\nabc",
    "CL.TE in HTTP/1.0": b"POST /a HTTP/1.0\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "TE in HTTP/1.0": b"POST /a HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc" + END,
    "CL.TE, in an offer to upgrade": LENGTH
    + b"Connection: upgrade\r\nUpgrade: h2c\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "two lengths": LENGTH + b"Content-Length: 4\r\n\r\nabc",
    "the same length twice": LENGTH + b"Content-Length: 3\r\n\r\nabc",
    "a list of lengths": POST + b"Content-Length: 3, 3\r\n\r\nabc",
    "a length with a plus": POST + b"Content-Length: +3\r\n\r\nabc",
    "a negative length": POST + b"Content-Length: -3\r\n\r\nabc",
    "a length in hex": POST + b"Content-Length: 0x3\r\n\r\nabc",
    "a length with a space in it": POST + b"Content-Length: 1 0\r\n\r\nabc",
    "a length with an underscore": POST + b"Content-Length: 1_0\r\n\r\nabc",
    "a length in other digits": POST + "Content-Length: \N{ARABIC-INDIC DIGIT THREE}\r\n\r\nabc".encode(),
    "a length behind a vertical tab": POST + b"Content-Length:\x0b3\r\n\r\nabc",
    "a length that overflows": POST + b"Content-Length: 18446744073709551619\r\n\r\nabc",
    "an empty length": POST + b"Content-Length:\r\n\r\nabc",
    "a space before the colon": POST + b"Content-Length : 3\r\n\r\nabc",
    "a tab before the colon": POST + b"Content-Length\t: 3\r\n\r\nabc",
    "NUL in a name": POST + b"Content-Length\0: 3\r\n\r\nabc",
    "NUL in a value": POST + b"X: a\0b\r\n\r\n",
    "a control character in a value": POST + b"X: a\x01b\r\n\r\n",
    "TE with a space before the colon": POST + b"Transfer-Encoding : chunked\r\n\r\n" + END,
    "TE of another name": POST + b"Transfer-Encoding: xchunked\r\n\r\n" + END,
    "TE with something behind": POST + b"Transfer-Encoding: chunked x\r\n\r\n" + END,
    "TE with a space behind": POST + b"Transfer-Encoding: chunked \r\n\r\n" + END,
    "TE with a tab behind": POST + b"Transfer-Encoding: chunked\t\r\n\r\n" + END,
    "TE behind a vertical tab": POST + b"Transfer-Encoding: \x0bchunked\r\n\r\n" + END,
    "TE in quotes": POST + b'Transfer-Encoding: "chunked"\r\n\r\n' + END,
    "TE with a parameter": POST + b"Transfer-Encoding: chunked;q=1\r\n\r\n" + END,
    "TE and another": POST + b"Transfer-Encoding: chunked, identity\r\n\r\n" + END,
    "another and TE": POST + b"Transfer-Encoding: identity, chunked\r\n\r\n" + END,
    "TE with a comma before": POST + b"Transfer-Encoding: ,chunked\r\n\r\n" + END,
    "TE with a comma behind": POST + b"Transfer-Encoding: chunked,\r\n\r\n" + END,
    "TE twice": POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n" + END,
    "TE, then another": POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: x\r\n\r\n" + END,
    "another, then TE": POST + b"Transfer-Encoding: x\r\nTransfer-Encoding: chunked\r\n\r\n" + END,
    "TE on the next line": POST + b"Transfer-Encoding:\r\n chunked\r\n\r\n" + END,
    "empty TE": POST + b"Transfer-Encoding:\r\nContent-Length: 3\r\n\r\nabc",
    "a folded header": POST + b"X: a\r\n b\r\n\r\n",
    "a space before the first header": b"POST /a HTTP/1.1\r\n Host: x\r\nHost: y\r\n\r\n",
    "a tab before the first header": b"POST /a HTTP/1.1\r\n\tHost: x\r\nHost: y\r\n\r\n",
    "a bare LF behind the request line": b"POST /a HTTP/1.1\nHost: x\r\n\r\n",
    "a bare LF behind a header": POST + b"X: a\nY: b\r\n\r\n",
    "a bare LF as the end of the head": POST + b"X: a\r\n\n",
    "a bare CR in a header": POST + b"X: a\rY: b\r\n\r\n",
    "two CR": POST + b"X: a\r\r\n\r\n",
    "a line without a colon": POST + b"Content-Length\r\n\r\n",
    "a header without a name": POST + b": x\r\n\r\n",
    "a name that is no token": POST + b"X(a): x\r\n\r\n",
    "two hosts": b"GET /a HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n",
    "a list of hosts": b"GET /a HTTP/1.1\r\nHost: x, y\r\n\r\n",
    "a host that is a path": b"GET /a HTTP/1.1\r\nHost: x/y\r\n\r\n",
    "no host": b"GET /a HTTP/1.1\r\n\r\n",
    "a lower-case method": b"get /a HTTP/1.1\r\nHost: x\r\n\r\n",
    "a method that is no token": b"GE(T /a HTTP/1.1\r\nHost: x\r\n\r\n",
    "a method that nobody knows": b"SMUGGLE /a HTTP/1.1\r\nHost: x\r\n\r\n",
    "a tab behind the method": b"GET\t/a HTTP/1.1\r\nHost: x\r\n\r\n",
    "a space in the target": b"GET /a b HTTP/1.1\r\nHost: x\r\n\r\n",
    "a control character in the target": b"GET /a\x01b HTTP/1.1\r\nHost: x\r\n\r\n",
    "a space before the method": b" GET /a HTTP/1.1\r\nHost: x\r\n\r\n",
    "another version": b"GET /a HTTP/1.2\r\nHost: x\r\n\r\n",
    "no version": b"GET /a\r\nHost: x\r\n\r\n",
    "a space behind the version": b"GET /a HTTP/1.1 \r\nHost: x\r\n\r\n",
    "a chunk of negative size": CHUNKED + b"-3\r\nabc" + END,
    "a chunk's size with a plus": CHUNKED + b"+3\r\nabc" + END,
    "a chunk's size with 0x": CHUNKED + b"0x3\r\nabc" + END,
    "a chunk's size with an underscore": CHUNKED + b"1_0\r\nabc" + END,
    "a chunk's size that is none": CHUNKED + b"xyz\r\nabc" + END,
    "a chunk's size that is empty": CHUNKED + b"\r\nabc" + END,
    "a chunk's size that overflows": CHUNKED + b"10000000000000003\r\nabc" + END,
    "a space before a chunk's size": CHUNKED + b" 3\r\nabc" + END,
    "a space behind a chunk's size": CHUNKED + b"3 \r\nabc" + END,
    "a bare LF behind a chunk's size": CHUNKED + b"3\nabc" + END,
    "a bare LF in a chunk's extension": CHUNKED + b"3;a\nabc" + END,
    "a bare CR in a chunk's extension": CHUNKED + b"3;a\rb\r\nabc" + END,
    "a line break in quotes in a chunk's extension": CHUNKED + b'3;a="b\r\nc"\r\nabc' + END,
    "NUL in a chunk's extension": CHUNKED + b"3;a\0\r\nabc" + END,
    "a chunk that goes on": CHUNKED + b"3\r\nabcX" + END,
    "a bare LF behind a chunk": CHUNKED + b"3\r\nabc\n0\r\n\r\n",
    "a bare CR behind a chunk": CHUNKED + b"3\r\nabc\r0\r\n\r\n",
    "a bare LF behind the last chunk": CHUNKED + b"3\r\nabc\r\n0\r\n\n",
    "a folded trailer": CHUNKED + b"3\r\nabc\r\n0\r\nX: a\r\n b\r\n\r\n",
    "a length in a trailer": CHUNKED + b"3\r\nabc\r\n0\r\nContent-Length: 5\r\n\r\n",
    "TE in a trailer": CHUNKED + b"3\r\nabc\r\n0\r\nTransfer-Encoding: chunked\r\n\r\n",
}


@pytest.mark.parametrize("step", [1, 1 << 20])
@pytest.mark.parametrize("data", REFUSED.values(), ids=REFUSED)
def test_what_could_be_read_in_two_ways_is_refused(data: bytes, step: int):
    """With one refusal, which ends the connection, and nothing behind it is read."""
    (refusal,) = parse(data + SMUGGLED, step)
    assert isinstance(refusal, Response)
    assert 400 <= refusal.status < 500 or refusal.status in (501, 505)


READ = {
    "a length with spaces around": POST + b"Content-Length: \t 3 \t\r\n\r\nabc",
    "a length with zeros before": POST + b"Content-Length: 0003\r\n\r\nabc",
    "an empty header before the length": POST + b"X:\r\nContent-Length: 3\r\n\r\nabc",
    "an empty header behind the length": LENGTH + b"X:\r\n\r\nabc",
    "a length that is named a hop's": LENGTH + b"Connection: Content-Length\r\n\r\nabc",
    "a name with an underscore is another": LENGTH + b"Content_Length: 99\r\nTransfer_Encoding: chunked\r\n\r\nabc",
    "a body of a GET": b"GET /a HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc",
    "a target with another host": b"POST http://other/a HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc",
    "empty lines before": b"\r\n\r\n" + LENGTH + b"\r\nabc",
    "two spaces behind the method": b"POST  /a HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc",
    "TE in capitals": POST + b"Transfer-Encoding: CHUNKED\r\n\r\n3\r\nabc" + END,
    "chunks of one byte": CHUNKED + b"1\r\na\r\n1\r\nb\r\n1\r\nc" + END,
    "a chunk's size with zeros before": CHUNKED + b"0" * 40 + b"3\r\nabc" + END,
    "a last chunk of zeros": CHUNKED + b"3\r\nabc\r\n0000\r\n\r\n",
    "a chunk's extensions": CHUNKED + b'3;a;b=c;d="e;f"\r\nabc' + END,
    "a trailer that names a host": CHUNKED + b"3\r\nabc\r\n0\r\nHost: other\r\n\r\n",
    "a trailer that offers to upgrade": CHUNKED + b"3\r\nabc\r\n0\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n",
    "an offer to upgrade, in chunks": POST
    + b"Connection: upgrade\r\nUpgrade: h2c\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc"
    + END,
}


@pytest.mark.parametrize("step", [1, 1 << 20])
@pytest.mark.parametrize("data", READ.values(), ids=READ)
def test_what_can_be_read_in_one_way_is_one_request(data: bytes, step: int):
    """And the next one begins where it ends."""
    first, second = parse(data + SMUGGLED, step)
    assert isinstance(first, HttpRequest) and isinstance(second, HttpRequest)
    assert (first.path, first.body, first.headers["host"]) == ("/a", b"abc", "x")
    assert (second.method, second.path) == ("GET", "/smuggled")


@pytest.mark.parametrize("behind", [b"GARBAGE\r\n\r\n", b"abc", b"0\r\n\r\n"])
@pytest.mark.parametrize("data", [LENGTH + b"\r\nabc", CHUNKED + b"3\r\nabc" + END], ids=["length", "chunks"])
def test_bytes_behind_a_body_are_no_part_of_it(data: bytes, behind: bytes):
    """What is behind it is the next request, or it is nothing."""
    request, refusal = parse(data + behind + SMUGGLED, 1 << 20)
    assert isinstance(request, HttpRequest) and request.body == b"abc"
    assert isinstance(refusal, Response) and refusal.status == 400
