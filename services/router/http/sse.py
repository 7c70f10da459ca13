"""Server-sent events, as far as the OpenAI API uses them."""

CONTENT_TYPE = "text/event-stream"
#: Proxies must pass each event on as it comes.
HEADERS = (("cache-control", "no-cache"), ("x-accel-buffering", "no"))

DONE = b"data: [DONE]\n\n"


#: What ends a line for who splits text by Unicode's rules, as many clients do. In JSON it is only ever within a string.
LINE_ENDS = tuple((end.encode(), f"\\u{ord(end):04x}".encode()) for end in "\x85\u2028\u2029")


def event(json: bytes) -> bytes:
    """One event. Compact JSON has no line breaks, so that one `data:` line holds it."""
    return b"data: %b\n\n" % one_line(json)


def one_line(json: bytes) -> bytes:
    """The same JSON, without anything that a client might take for the end of the line."""
    if not json.isascii():
        for end, escaped in LINE_ENDS:
            json = json.replace(end, escaped)
    return json
