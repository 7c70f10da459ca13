"""A plain HTTP/1.1 client on a socket: it sends what it is told and reads one response at a time."""

import json
import socket
import ssl
from dataclasses import dataclass
from typing import Any, Self

LIVENESS_S = 20.0


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The data of server-sent events; the last one as it is when it is [DONE]."""
        lines = self.body.decode().split("\n\n")
        assert lines.pop() == "" and all(line.startswith("data: ") for line in lines)
        data = [line.removeprefix("data: ") for line in lines]
        return [one if one == "[DONE]" else json.loads(one) for one in data]


class Wire:
    def __init__(self, port: int, *, receive_buffer: int | None = None, tls: ssl.SSLContext | None = None) -> None:
        self.socket = socket.socket()
        if receive_buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(LIVENESS_S)
        self.socket.connect(("127.0.0.1", port))
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_hostname="localhost")
        self._file = self.socket.makefile("rb")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()
        self.socket.close()

    def send(self, data: bytes) -> Self:
        self.socket.sendall(data)
        return self

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        return self.send(request(method, path, body, **headers)).read(head_only=method == "HEAD")

    def read_head(self) -> tuple[int, dict[str, str]]:
        status_line = self._file.readline()
        assert status_line.startswith(b"HTTP/1.1 "), status_line
        headers: dict[str, str] = {}
        while (line := self._file.readline()) != b"\r\n":
            assert line.endswith(b"\r\n"), "the headers are cut off"
            name, _, value = line.decode("latin-1").rstrip("\r\n").partition(": ")
            headers[name] = value
        return int(status_line.split()[1]), headers

    def read(self, *, head_only: bool = False) -> Answer:
        status, headers = self.read_head()
        if head_only or status == 100:
            body = b""
        elif headers.get("transfer-encoding") == "chunked":
            body = b"".join(iter(self.read_chunk, b""))
        elif "content-length" in headers:
            body = self._file.read(int(headers["content-length"]))
        else:
            body = self._file.read()
        return Answer(status, headers, body)

    def read_chunk(self) -> bytes:
        size_line = self._file.readline()
        assert size_line.endswith(b"\r\n"), "the body is cut off"
        chunk = self._file.read(int(size_line, 16) + 2)
        assert chunk.endswith(b"\r\n"), "the body is cut off"
        return chunk[:-2]

    def rest(self) -> bytes:
        """Everything until the server closes."""
        return self._file.read()


def request(method: str, path: str, body: Any = None, **headers: str) -> bytes:
    """`headers` are named with underscores; `body` is JSON unless it is bytes."""
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(data)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + data
