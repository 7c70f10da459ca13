"""Server-sent events, as far as the OpenAI API uses them."""

CONTENT_TYPE = "text/event-stream"
#: Proxies must pass each event on as it comes.
HEADERS = (("cache-control", "no-cache"), ("x-accel-buffering", "no"))

DONE = b"data: [DONE]\n\n"


def event(json: bytes) -> bytes:
    """One event. Compact JSON has no line breaks, so that one `data:` line holds it."""
    return b"data: %b\n\n" % json
