"""What a web page of another site sends to a port of this machine, also by a name that its author points there."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

FOREIGN = "http://evil.example"
_PREFLIGHT = "access-control-request-method: POST\r\naccess-control-request-headers: authorization, content-type"
_KEY = "sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA=="
_UPGRADE = f"connection: upgrade\r\nupgrade: websocket\r\n{_KEY}"


@dataclass(frozen=True, slots=True)
class Request:
    """A request: ``host`` is the name by which the page calls this machine, ``headers`` are further lines."""

    method: str = "POST"
    headers: str = ""
    body: str = ""
    host: str = "127.0.0.1"

    def send(self, port: int, path: str, address: str = "127.0.0.1", seconds: float = 5.0) -> Reply:
        """Send it to ``port`` and read until the connection ends or is silent for ``seconds``."""
        lines = [f"{self.method} {path} HTTP/1.1", f"host: {self.host}", f"origin: {FOREIGN}", self.headers]
        length = [f"content-length: {len(self.body)}"] if self.body else []
        head = "\r\n".join([line for line in [*lines, *length, "connection: close"] if line])
        received = b""
        with socket.create_connection((address, port), timeout=seconds) as client, suppress(OSError):
            client.sendall(f"{head}\r\n\r\n{self.body}".encode())
            while part := client.recv(1 << 16):
                received += part
        return Reply(received)


@dataclass(frozen=True, slots=True)
class Reply:
    """What a port sent."""

    data: bytes

    @property
    def status(self) -> int:
        """The status of HTTP; 0 if the port sent something else or nothing."""
        return int(self.data[9:12]) if self.data.startswith(b"HTTP/1.") else 0

    @property
    def is_readable(self) -> bool:
        """Whether a browser gives the page a body that it was sent."""
        head, _, body = self.data.lower().partition(b"\r\n\r\n")
        return bool(body) and self.status < 400 and b"\naccess-control-allow-origin: " in head


_JSON = '{"model": "m", "prompt": "x", "text": "x", "messages": [{"role": "user", "content": "x"}]}'
REQUESTS: Mapping[str, Request] = {
    "posts a form": Request(headers="content-type: application/x-www-form-urlencoded", body="text=x&messages=x"),
    "posts a form with a file": Request(
        headers="content-type: multipart/form-data; boundary=x",
        body='--x\r\ncontent-disposition: form-data; name="file"; filename="x"\r\n\r\nx\r\n--x--\r\n',
    ),
    "posts JSON as plain text": Request(headers="content-type: text/plain", body=_JSON),
    "posts JSON without a type": Request(body=_JSON),
    "reads from another site": Request("GET"),
    "embeds an image": Request("GET", "accept: image/*\r\nsec-fetch-mode: no-cors"),
    "asks whether it may send more": Request("OPTIONS", _PREFLIGHT),
    "opens a websocket": Request("GET", _UPGRADE),
    "reads by a name of its own": Request("GET", host="evil.example"),
    "posts by a name of its own": Request(headers="content-type: application/json", body=_JSON, host="evil.example"),
    "opens a websocket by a name of its own": Request("GET", _UPGRADE, host="evil.example"),
}
"""By what the page does. The last three are DNS rebinding: to the browser, the port then belongs to the page's site."""
HOSTS: Mapping[str, Request] = {
    f"writes an open path into the host: {host}": Request(
        headers="content-type: application/json", body=_JSON, host=host
    )
    for host in ("x/health?", "x/metrics#", "[::1]/health?", "x@y/health")
}
"""What only a program can send: a host name that changes the address which a server puts together from it."""
