"""A proxy in front of a storage service that injects faults: a fault is a value.

with FaultProxy("http://127.0.0.1:4566", [Fault("lost-reply", "create", probability=0.2, seed=1)]) as proxy:
    ...  # set AWS_ENDPOINT_URL to proxy.url, and work with the bucket
    print(proxy.injected)

The proxy speaks plain HTTP/1.1, counts every request by its operation, and understands the protocols of S3, Google
Cloud Storage and Azure well enough to tell creations, listings, reads and deletions apart. With `bytes_per_second`, all
answers share a line of that bandwidth.
"""

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Self
from urllib.parse import parse_qs, unquote, urlsplit

Kind = Literal[
    "latency",  # the answer comes later
    "server-error",  # 503, and the server did not act
    "throttled",  # 429, and the server did not act
    "conflict",  # 409, and the server did not act
    "reset-before",  # the connection is reset before the server acts
    "reset-after",  # … after it has acted
    "lost-reply",  # the server acts, and a gateway answers 500 in its place
    "short-body",  # the connection ends in the middle of the answer
    "stalled-body",  # nothing comes any more in the middle of the answer
    "flipped-bit",  # one bit of the answer's body is wrong
    "stale-listing",  # the answer to the same listing, some requests ago
]
Operation = Literal["any", "create", "write", "read", "head", "list", "delete"]
_LIMIT = 1 << 30
_PIECE_BYTES = 64 << 10
_LATE_SECONDS = 0.005
_STALLED_SECONDS = 3600.0
_REPLIES = {
    "server-error": (503, "SlowDown"),
    "throttled": (429, "TooManyRequests"),
    "conflict": (409, "ConditionalRequestConflict"),
    "lost-reply": (500, "InternalError"),
}


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong with requests of an operation whose path, without the bucket, starts with `prefix`."""

    kind: Kind
    operation: Operation = "any"
    prefix: str = ""
    probability: float = 1.0
    seed: int = 0
    most: int | None = None  # how often at most
    seconds: float = 0.05  # of latency
    byte: int | None = None  # that a flipped bit is in; None: any


@dataclass(slots=True)
class _Request:
    head: bytes
    body: bytes
    method: str
    target: str
    operation: Operation
    key: str


@dataclass(slots=True)
class _Armed:
    fault: Fault
    chance: random.Random
    left: float = field(default=float("inf"))

    def strikes(self, request: _Request) -> bool:
        fault = self.fault
        if fault.operation not in ("any", request.operation) or not request.key.startswith(fault.prefix):
            return False
        if self.left <= 0 or self.chance.random() >= fault.probability:
            return False
        self.left -= 1
        return True


class FaultProxy:
    """Listens on loopback while it is used as a context, in a thread of this process."""

    def __init__(self, upstream: str, faults: Sequence[Fault] = (), bytes_per_second: float | None = None) -> None:
        self._rate, self._line_free_at = bytes_per_second, 0.0
        address = urlsplit(upstream)
        self._host, self._port = address.hostname or "", address.port or 80
        self.requests: Counter[str] = Counter()  # operation -> how many
        self.injected: Counter[str] = Counter()  # kind -> how many
        self.log: list[tuple[str, str]] = []  # (operation, path without the bucket)
        # `time.monotonic` when each request came and when it was answered, and its path without the bucket
        self.spans: list[tuple[float, float, str]] = []
        self.bytes_sent = 0  # of answers' bodies
        self._listings: dict[str, bytes] = {}
        self._chance = random.Random(0)
        self._lock = threading.Lock()
        self.set_faults(faults)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="forebay-faults", daemon=True)
        self._ready = threading.Event()

    def set_faults(self, faults: Sequence[Fault]) -> None:
        """Replace the faults; each starts its own sequence of chances."""
        with self._lock:
            self._armed = [
                _Armed(fault, random.Random(fault.seed), float("inf") if fault.most is None else fault.most)
                for fault in faults
            ]

    def reset_counts(self) -> None:
        with self._lock:
            self.requests.clear()
            self.injected.clear()
            self.log.clear()
            self.spans.clear()
            self.bytes_sent = 0

    def __enter__(self) -> Self:
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        self._stopping = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=_LIMIT)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._ready.set()
        await self._stopping.wait()
        server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        upstream: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        try:
            while (request := await _read_request(reader)) is not None:
                came = time.monotonic()
                is_open = await self._answer(request, writer, upstream)
                self.spans.append((came, time.monotonic(), request.key))
                if not is_open:
                    break
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError, ValueError):
            pass
        finally:
            self._tasks.discard(task)
            for _, far in upstream:
                far.close()
            writer.close()

    async def _answer(
        self,
        request: _Request,
        writer: asyncio.StreamWriter,
        upstream: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]],
    ) -> bool:
        """Answer a request; return False if the connection has to be closed."""
        fault = self._choose(request)
        kind = fault.kind if fault else None
        if fault and kind == "latency":
            await asyncio.sleep(fault.seconds)
        if kind == "reset-before":
            writer.transport.abort()
            return False
        if kind in ("server-error", "throttled", "conflict"):
            writer.write(_reply(kind, request.method))
            await writer.drain()
            return True
        head, body = await self._forward(request, upstream)
        if kind == "reset-after":
            writer.transport.abort()
            return False
        if kind == "lost-reply":
            writer.write(_reply(kind, request.method))
            await writer.drain()
            return True
        if fault and kind == "flipped-bit" and body:
            at = self._chance.randrange(len(body)) if fault.byte is None else fault.byte % len(body)
            changed = bytearray(body)
            changed[at] ^= 1 << self._chance.randrange(8)
            body = bytes(changed)
        if request.operation == "list" and head.startswith(b"HTTP/1.1 200"):
            with self._lock:
                older = self._listings.get(request.target, body)
                self._listings[request.target] = body if kind != "stale-listing" else older
            body = older if kind == "stale-listing" else body
            head = _with_length(head, len(body))
        writer.write(head)
        if kind in ("short-body", "stalled-body") and body:
            writer.write(body[: len(body) // 2])
            await writer.drain()
            if kind == "stalled-body":
                await asyncio.sleep(_STALLED_SECONDS)
            writer.transport.abort()
            return False
        await self._send(writer, b"" if request.method == "HEAD" else body)
        return True

    async def _send(self, writer: asyncio.StreamWriter, body: bytes) -> None:
        """Send a body in pieces, all connections together not faster than the line."""
        for start in range(0, len(body), _PIECE_BYTES):
            piece = body[start : start + _PIECE_BYTES]
            if self._rate is not None:
                # A sleep ends up to a few milliseconds late: the line catches up, or one connection had half of it.
                self._line_free_at = max(self._line_free_at, time.monotonic() - _LATE_SECONDS) + len(piece) / self._rate
                await asyncio.sleep(self._line_free_at - time.monotonic())
            writer.write(piece)
            await writer.drain()
            self.bytes_sent += len(piece)

    def _choose(self, request: _Request) -> Fault | None:
        with self._lock:
            self.requests[request.operation] += 1
            self.log.append((request.operation, request.key))
            for armed in self._armed:
                if armed.strikes(request):
                    self.injected[armed.fault.kind] += 1
                    return armed.fault
        return None

    async def _forward(
        self, request: _Request, upstream: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]
    ) -> tuple[bytes, bytes]:
        """Send a request on; a connection that the server has closed meanwhile is opened again."""
        for attempt in range(2):
            if not upstream:
                upstream.append(await asyncio.open_connection(self._host, self._port, limit=_LIMIT))
            near, far = upstream[0]
            try:
                far.write(request.head + request.body)
                await far.drain()
                return await _read_answer(near, request.method)
            except (ConnectionError, asyncio.IncompleteReadError):
                far.close()
                upstream.clear()
                if attempt:
                    raise
        raise AssertionError("the second attempt returns or raises")


async def _read_request(reader: asyncio.StreamReader) -> _Request | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    fields = _fields(head)
    if "chunked" in fields.get("transfer-encoding", ""):
        body = await _read_chunks(reader)
        head = _with_length(head, len(body))
    else:
        body = await reader.readexactly(int(fields.get("content-length", 0)))
    if fields.get("expect"):
        raise ValueError("Expect is not supported")
    method, target, _ = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
    url = urlsplit(target)
    _, _, key = unquote(url.path).lstrip("/").partition("/")
    return _Request(head, body, method, target, _operation(method, url.query, fields), key)


async def _read_answer(reader: asyncio.StreamReader, method: str) -> tuple[bytes, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    fields, status = _fields(head), int(head.split(b" ", 2)[1])
    if method == "HEAD" or status in (204, 304):
        return head, b""
    if "chunked" in fields.get("transfer-encoding", ""):
        body = await _read_chunks(reader)
        return _with_length(head, len(body)), body
    return head, await reader.readexactly(int(fields.get("content-length", 0)))


async def _read_chunks(reader: asyncio.StreamReader) -> bytes:
    parts = []
    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        parts.append(await reader.readexactly(size))
        await reader.readexactly(2)
    while (await reader.readuntil(b"\r\n")) != b"\r\n":
        pass
    return b"".join(parts)


def _fields(head: bytes) -> dict[str, str]:
    lines = head.decode("latin-1").split("\r\n")[1:]
    return {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines) if name}


def _with_length(head: bytes, length: int) -> bytes:
    first, *lines = head.removesuffix(b"\r\n\r\n").split(b"\r\n")
    kept = [line for line in lines if not line.lower().startswith((b"transfer-encoding:", b"content-length:"))]
    return b"\r\n".join([first, *kept, b"Content-Length: %d" % length]) + b"\r\n\r\n"


def _operation(method: str, query: str, fields: dict[str, str]) -> Operation:
    words = parse_qs(query, keep_blank_values=True)
    if method == "DELETE" or (method == "POST" and "delete" in words):
        return "delete"
    if method == "PUT" or (method == "POST" and words.keys() & {"uploads", "uploadId"}):
        is_new = fields.get("if-none-match") == "*" or fields.get("x-goog-if-generation-match") == "0"
        return "create" if is_new else "write"
    if method == "HEAD":
        return "head"
    is_listing = "list-type" in words or words.get("comp") == ["list"] or "prefix" in words
    return "list" if method == "GET" and is_listing else "read" if method == "GET" else "any"


def _reply(kind: str, method: str) -> bytes:
    status, code = _REPLIES[kind]
    body = b"" if method == "HEAD" else f"<Error><Code>{code}</Code><Message>injected</Message></Error>".encode()
    head = f"HTTP/1.1 {status} Injected\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body
