"""`helm test`: every pod behind the names given is ready, and a router lists a model and answers a prompt with it.

Only the standard library. What fails is tried again until the time is over; exit code 0 or 1.
"""

import argparse
import json
import os
import socket
import ssl
import sys
import time
import urllib.request
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

TRY_S = 30.0
PAUSE_S = 2.0


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--api", action="append", default=[], help="URL of routers.")
    parser.add_argument("--ready", action="append", default=[], help="URL of pages whose name stands for many pods.")
    parser.add_argument("--timeout-s", type=float, default=120.0)
    given = parser.parse_args()
    deadline = time.monotonic() + given.timeout_s
    checks = [(url, pages_ready) for url in given.ready] + [(url, answers) for url in given.api]
    passed = [succeeds(url, check, deadline) for url, check in checks]
    return 0 if all(passed) else 1


def succeeds(url: str, check: Callable[[str], str], deadline: float) -> bool:
    while True:
        try:
            said, good = check(url), True
        except (OSError, ValueError, LookupError) as error:
            said, good = str(error) or type(error).__name__, False
        if good or time.monotonic() > deadline:
            sys.stdout.write(f"{'ok' if good else 'FAILED'}: {url}: {said}\n")
            sys.stdout.flush()
            return good
        time.sleep(PAUSE_S)


def pages_ready(url: str) -> str:
    parts = urlsplit(url)
    found = socket.getaddrinfo(parts.hostname, parts.port, family=socket.AF_INET, type=socket.SOCK_STREAM)
    pods = sorted({str(address[0]) for *_, address in found})
    for pod in pods:
        ask(f"http://{pod}:{parts.port}/ready")
    return f"{len(pods)} ready"


def answers(url: str) -> str:
    key = os.environ.get("API_KEY")
    model = json.loads(ask(f"{url}/v1/models", key))["data"][0]["id"]
    body = {"model": model, "prompt": "Kubernetes says", "max_tokens": 4}
    answer = json.loads(ask(f"{url}/v1/completions", key, body))
    usage = answer["usage"]
    if not 1 <= usage["completion_tokens"] <= 4:
        raise ValueError(f"{usage['completion_tokens']} tokens came, 1 to 4 were asked for")
    return f"{model} answered with {usage['completion_tokens']} tokens"


def ask(url: str, key: str | None = None, body: dict[str, Any] | None = None) -> bytes:
    """Raises OSError for what is not 200. A router's certificate is for its public name, not for the one used here."""
    request = urllib.request.Request(url, data=None if body is None else json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    if key:
        request.add_header("Authorization", f"Bearer {key}")
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with urllib.request.urlopen(request, timeout=TRY_S, context=context) as response:
        return bytes(response.read())


if __name__ == "__main__":
    sys.exit(main())
