"""The viewer as an ASGI application and its server: an address names a record, a picture, a file or a stream of events.

/                     the page
/static/…             its modules and style
/api/caches.json      the caches by their number
/api/0/….json         records of the first cache (`forebay.viewer.page_records`)
/api/0/live           server-sent events, at least one a second

What a request must look like before a page or a record is served, and the headers of every answer.

method     GET or HEAD
Host       this machine: another name is a page that had its DNS name point here (DNS rebinding)
Origin     the same as Host, where a browser sends one; requests that a foreign page makes are refused
token      the first part of the path, where the server listens beyond this machine: http://node7:8765/k3J…/

`Server` runs it on a port, in a thread. A request has to arrive in time, an answer has to be read in time, and the
number of connections is limited: uvicorn waits for both for ever, so clients that send a byte now and then, or read
nothing, would use up its files and keep their answers in its memory.
"""

import asyncio
import hmac
import ipaddress
import re
import secrets
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlsplit

from forebay.cache.records import as_json
from forebay.errors import LibraryMissing
from forebay.preview.row_records import Viewing
from forebay.viewer.bundle import STATIC, TYPES
from forebay.viewer.live_build import BuildMoment
from forebay.viewer.page_records import ENDPOINTS, RecordProblem, answer, cache_names, compared, guarded
from forebay.viewer.picture_rows import image_png
from forebay.viewer.shown_cache import BadQuery, Query, ShownCache

try:
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol
except ModuleNotFoundError as missing:
    raise LibraryMissing(missing.name or "uvicorn", "`forebay view`", "viewer") from missing

LOOPBACK = "127.0.0.1"
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors {frames}"
)
_NOTEBOOKS = "http://localhost:* http://127.0.0.1:* https://localhost:*"


@dataclass(frozen=True)
class Guard:
    """Refuses what the viewer never needs."""

    hosts: frozenset[str]  # names that a request may ask for, besides addresses
    token: str = ""
    everywhere: bool = False  # listens beyond this machine: any numeric address may be asked for
    framed: bool = False  # a notebook on this machine may show the page

    def problem(self, method: str, path: str, headers: Mapping[str, str]) -> tuple[int, str] | None:
        """The status and the reason of a refusal; None for a request that may pass. Names of headers are lower-case."""
        if method not in ("GET", "HEAD"):
            return 405, "the viewer only reads: use GET"
        host = headers.get("host", "")
        if not self._is_known(host):
            return 403, "this Host is not served here; open the address that `forebay view` printed"
        if headers.get("origin", f"http://{host}") != f"http://{host}":
            return 403, "pages of other origins may not read a cache"
        foreign = headers.get("sec-fetch-site", "none") not in ("none", "same-origin")
        if foreign and headers.get("sec-fetch-mode") != "navigate":
            return 403, "pages of other sites may not read a cache"
        if self.token and not self._has_token(path):
            return 403, "the address lacks its token; open the whole address that `forebay view` printed"
        return None

    def without_token(self, path: str) -> str:
        return path[len(self.token) + 1 :] or "/" if self.token else path

    def headers(self) -> dict[str, str]:
        """The headers of every answer."""
        return {
            "content-security-policy": _POLICY.format(frames=_NOTEBOOKS if self.framed else "'none'"),
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
            "cross-origin-resource-policy": "same-origin",
            "cross-origin-opener-policy": "same-origin",
            "cache-control": "no-store",
        }

    def _is_known(self, host: str) -> bool:
        try:
            name = (urlsplit(f"//{host}").hostname or "").lower()
        except ValueError:
            return False
        if name in self.hosts:
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        return self.everywhere or address.is_loopback

    def _has_token(self, path: str) -> bool:
        first = path.split("/")[1] if path.startswith("/") else ""
        return hmac.compare_digest(first.encode(), self.token.encode()) and path.startswith(f"/{self.token}/")


def known_names(host: str) -> frozenset[str]:
    """The names under which a server that listens on `host` may be asked."""
    names: Iterable[str] = ["localhost"]
    if host != LOOPBACK:
        names = ["localhost", host, socket.gethostname(), socket.getfqdn()]
    return frozenset(name.lower() for name in names)


TICK_SECONDS, NAP_SECONDS = 0.9, 0.1  # between events, and between looks whether the server ends
THREADS = 16  # that make records
_OF_CACHE = re.compile(r"/api/(\d{1,6})/(\w+)(\.json|\.png|)")

Scope = Mapping[str, Any]
Receive = Callable[[], Awaitable[Mapping[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
Made = TypeVar("Made")


@dataclass(frozen=True)
class Answer:
    body: bytes
    media: str = "text/plain; charset=utf-8"
    status: int = 200


def _refusal(status: int, reason: str) -> Answer:
    return Answer(reason.encode("utf-8", "backslashreplace"), status=status)


def _json(record: object) -> Answer:
    return Answer(as_json(record), "application/json")


@dataclass(frozen=True)
class WebApp:
    """Answers requests that its guard lets pass; streams of events end when `ending` is set."""

    caches: Sequence[ShownCache]
    guard: Guard
    ending: threading.Event
    _files: Mapping[str, bytes] = field(
        default_factory=lambda: {
            entry.name: entry.read_bytes() for entry in STATIC.iterdir() if entry.name.rpartition(".")[2] in TYPES
        }
    )
    _threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(THREADS, "forebay-viewer"))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        problem = self.guard.problem(scope["method"], scope["path"], headers)
        if problem is not None:
            await self._send(send, _refusal(*problem))
            return
        path = self.guard.without_token(scope["path"])
        shown, name, kind = self._of_cache(path)
        if shown is not None and (name, kind) == ("live", "") and scope["method"] == "GET":
            await self._stream(shown, receive, send)
        else:
            await self._send(send, await self._answer(path, shown, name + kind, scope["query_string"]))

    def close(self) -> None:
        """Release the threads; records under way are finished."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _of_cache(self, path: str) -> tuple[ShownCache | None, str, str]:
        """The cache, record and suffix that a path names."""
        found = _OF_CACHE.fullmatch(path)
        if found is None or int(found[1]) >= len(self.caches):
            return None, "", ""
        return self.caches[int(found[1])], found[2], found[3]

    async def _answer(self, path: str, shown: ShownCache | None, name: str, query_string: bytes) -> Answer:
        if path == "/":
            return self._file("index.html")
        if path.startswith("/static/"):
            return self._file(path.removeprefix("/static/"))
        make = self._maker(path, shown, name, Query(tuple(parse_qsl(query_string.decode("latin-1"), True))))
        if make is None:
            return _refusal(404, "there is no such record")
        try:
            made = await self._in_thread(make)
        except BadQuery as error:
            return _refusal(400, str(error))
        except IndexError as error:
            return _refusal(404, str(error))
        return Answer(made, "image/png") if isinstance(made, bytes) else _json(made)

    def _maker(self, path: str, shown: ShownCache | None, name: str, query: Query) -> Callable[[], object] | None:
        """What makes the record of a path; None where there is none."""
        if path == "/api/caches.json":
            return partial(cache_names, self.caches)
        if path == "/api/compare.json":
            return partial(compared, self.caches, query)
        if shown is None:
            return None
        if name == "image.png":
            return partial(guarded, shown, partial(image_png, shown, query))
        if name == "live":
            return lambda: None  # of a HEAD request
        record = name.removesuffix(".json")
        return partial(answer, shown, record, query) if record in ENDPOINTS and name.endswith(".json") else None

    def _file(self, name: str) -> Answer:
        if name not in self._files:
            return _refusal(404, "there is no such file")
        return Answer(self._files[name], f"{TYPES[name.rpartition('.')[2]]}; charset=utf-8")

    async def _in_thread(self, make: Callable[[], Made]) -> Made:
        return await asyncio.get_running_loop().run_in_executor(self._threads, make)

    async def _send(self, send: Send, found: Answer) -> None:
        await self._begin(send, found.status, found.media, {"content-length": str(len(found.body))})
        await send({"type": "http.response.body", "body": found.body})

    async def _begin(self, send: Send, status: int, media: str, more: Mapping[str, str]) -> None:
        headers = {"content-type": media, **more, **self.guard.headers()}
        pairs = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": pairs})

    async def _stream(self, shown: ShownCache, receive: Receive, send: Send) -> None:
        await self._begin(send, 200, "text/event-stream", {})
        gone = asyncio.create_task(_disconnected(receive))
        try:
            async for event in self._events(shown, gone):
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            gone.cancel()

    async def _events(self, shown: ShownCache, gone: "asyncio.Task[None]") -> AsyncIterator[bytes]:
        """First everything, then at least once a second what changed."""
        states: dict[str, str] = {}
        while not (self.ending.is_set() or gone.done()):
            due = time.monotonic() + TICK_SECONDS
            snapshot = await self._in_thread(partial(guarded, shown, shown.watch.snapshot))
            yield b"data: " + as_json(_event(shown, states, snapshot)) + b"\n\n"
            states = (
                {} if isinstance(snapshot, RecordProblem) else {one.layer: one.states for one in snapshot.map.layers}
            )
            while time.monotonic() < due and not (self.ending.is_set() or gone.done()):
                await asyncio.sleep(NAP_SECONDS)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _event(shown: ShownCache, states: dict[str, str], snapshot: BuildMoment | RecordProblem) -> dict[str, object]:
    if isinstance(snapshot, RecordProblem):
        return {"map": snapshot}
    if not states:
        return {"map": snapshot.map, "live": snapshot.live, "history": list(shown.watch.history)}
    return {
        "live": snapshot.live,
        "generation": snapshot.map.generation,
        "changes": changes(states, snapshot),
        "claims": snapshot.map.claims,
    }


def changes(before: dict[str, str], snapshot: BuildMoment) -> dict[str, Any]:
    """Per layer, the chunks whose state changed, or the whole layer where there are more chunks than before."""
    found: dict[str, Any] = {}
    for layer in snapshot.map.layers:
        old, new = before.get(layer.layer, ""), layer.states
        if len(old) != len(new):
            found[layer.layer] = layer
        elif old != new:
            found[layer.layer] = {
                "cells": [[at, new[at]] for at in range(len(new)) if old[at] != new[at]],
                "counts": layer.counts,
                "headers_checked": layer.headers_checked,
            }
    return found


MOST_CONNECTIONS = 256
REQUEST_SECONDS = 10.0  # in which the head of a request has to arrive
ANSWER_SECONDS = 60.0  # in which an answer has to be read, or the events that fill the buffers


class Connection(H11Protocol):
    """Closes itself if a request takes too long to arrive or an answer to be read, or too many others are open."""

    _deadline: asyncio.TimerHandle | None = None  # of the request
    _unread: asyncio.TimerHandle | None = None  # of the answer

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > MOST_CONNECTIONS:
            transport.abort()
        else:
            self._wait()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_waiting()
        elif self._deadline is None:
            self._wait()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait_for_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.cycle is not None and not self.cycle.response_complete:  # else the rest has to be read too
            self._stop_waiting_for_reader()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._wait_for_reader()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._stop_waiting_for_reader()
        super().connection_lost(exc)

    def _wait(self) -> None:
        self._deadline = self.loop.call_later(REQUEST_SECONDS, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _wait_for_reader(self) -> None:
        self._stop_waiting_for_reader()
        self._unread = self.loop.call_later(ANSWER_SECONDS, self._drop_unread)

    def _stop_waiting_for_reader(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _drop_unread(self) -> None:
        self._unread = None
        if self.transport.get_write_buffer_size():
            self.transport.abort()


@dataclass(frozen=True)
class Address:
    """Where a viewer is reached."""

    host: str
    port: int
    token: str

    def __str__(self) -> str:
        host = socket.gethostname() if self.host in ("0.0.0.0", "::") else self.host  # which no browser can open
        shown = f"[{host}]" if ":" in host else host
        return f"http://{shown}:{self.port}/" + (f"{self.token}/" if self.token else "")


class Server:
    """A viewer on a port, in a thread."""

    def __init__(
        self, caches: Sequence[ShownCache], *, host: str = LOOPBACK, port: int = 0, token: bool = False,
        framed: bool = False,
    ) -> None:  # fmt: skip
        self._caches = tuple(caches)
        secret = secrets.token_urlsafe(24) if token or host != LOOPBACK else ""
        self._ending = threading.Event()
        guard = Guard(known_names(host), secret, everywhere=host != LOOPBACK, framed=framed)
        self._app = WebApp(self._caches, guard, self._ending)
        config = uvicorn.Config(
            self._app, host=host, port=port, log_level="error", access_log=False, server_header=False, lifespan="off",
            timeout_graceful_shutdown=2, ws="none", http=Connection,
        )  # fmt: skip
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family)
        # asyncio does not set this on sockets that it is passed. Without it, Linux keeps the body of an answer back for
        # 40 ms, until the client acknowledges the head.
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._server = uvicorn.Server(config)
        self.address = Address(host, int(self._socket.getsockname()[1]), secret)
        self._thread = threading.Thread(
            target=self._server.run, args=([self._socket],), name="forebay-viewer", daemon=True
        )

    def viewing(self) -> Viewing:
        return Viewing(url=str(self.address), caches=tuple(shown.root for shown in self._caches))

    def start(self) -> "Server":
        """Serve in a thread; returns when requests are answered."""
        self._thread.start()
        while not self._server.started and self._thread.is_alive():
            time.sleep(0.01)
        return self

    def wait(self) -> None:
        """Wait until the server ends; Ctrl-C interrupts it."""
        self._thread.join()

    def stop(self) -> None:
        self._ending.set()
        self._server.should_exit = True
        self._thread.join()
        self._app.close()
