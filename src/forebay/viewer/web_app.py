"""The viewer as an ASGI application and its server. Addresses lead to records, pictures, files and event streams.

/                     the page
/static/…             its modules and style
/api/caches.json      the caches by their number
/api/0/….json         records of the first cache (`forebay.viewer.page_records`)
/api/0/live           server-sent events, at least one a second

What a request must look like before a page or a record is served, and the headers of every answer.

method     GET or HEAD
Host       this machine: another name is a page that had its DNS name point here (DNS rebinding)
Origin     the same as Host, where a browser sends one; requests of another page are rejected
token      the first part of the path, where the server listens beyond this machine: http://node7:8765/k3J…/
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

from forebay.errors import LibraryMissing
from forebay.preview.row_records import Viewing
from forebay.records import as_json
from forebay.viewer.bundle import STATIC, TYPES
from forebay.viewer.chunk_map import ChunkMap
from forebay.viewer.image_rows import image_png
from forebay.viewer.live_build import BuildMoment
from forebay.viewer.page_records import ENDPOINTS, RecordProblem, answer, cache_names, compared, guarded
from forebay.viewer.shown_cache import BadQuery, Query, ShownCache

try:
    import uvicorn
except ModuleNotFoundError as missing:
    raise LibraryMissing(
        f"`forebay view` needs '{missing.name or 'uvicorn'}', which is not installed",
        hint="pip install 'forebay[viewer]'",
        extra="viewer",
    ) from missing

LOOPBACK = "127.0.0.1"
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors {frames}"
)
_NOTEBOOKS = "http://localhost:* http://127.0.0.1:* https://localhost:*"


@dataclass(frozen=True)
class Guard:
    """Rejects requests that the viewer never needs."""

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
    """The host names that requests to this server may use."""
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
Result = TypeVar("Result")


@dataclass(frozen=True)
class Answer:
    body: bytes
    media: str = "text/plain; charset=utf-8"
    status: int = 200


def _refusal(status: int, reason: str) -> Answer:
    return Answer(reason.encode("utf-8", "backslashreplace"), status=status)


@dataclass(frozen=True)
class WebApp:
    """Answers requests that the guard accepts; event streams end when `ending` is set."""

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
        match = _OF_CACHE.fullmatch(path)
        if match is None or int(match[1]) >= len(self.caches):
            return None, "", ""
        return self.caches[int(match[1])], match[2], match[3]

    async def _answer(self, path: str, shown: ShownCache | None, name: str, query_string: bytes) -> Answer:
        if path == "/":
            return self._file("index.html")
        if path.startswith("/static/"):
            return self._file(path.removeprefix("/static/"))
        make = self._maker(path, shown, name, Query(tuple(parse_qsl(query_string.decode("latin-1"), True))))
        if make is None:
            return _refusal(404, "there is no such record")
        try:
            result = await self._in_thread(make)
        except BadQuery as error:
            return _refusal(400, str(error))
        except IndexError as error:
            return _refusal(404, str(error))
        if isinstance(result, bytes):
            return Answer(result, "image/png")
        return Answer(as_json(result), "application/json")

    def _maker(self, path: str, shown: ShownCache | None, name: str, query: Query) -> Callable[[], object] | None:
        """Return the function that makes the record of a path, or None."""
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

    async def _in_thread(self, make: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, make)

    async def _send(self, send: Send, answer: Answer) -> None:
        await self._begin(send, answer.status, answer.media, {"content-length": str(len(answer.body))})
        await send({"type": "http.response.body", "body": answer.body})

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
        """At least one event a second, with the map where it changed."""
        before: ChunkMap | None = None
        while not (self.ending.is_set() or gone.done()):
            due = time.monotonic() + TICK_SECONDS
            snapshot = await self._in_thread(partial(guarded, shown, shown.watch.snapshot))
            yield b"data: " + as_json(_event(shown, before, snapshot)) + b"\n\n"
            before = None if isinstance(snapshot, RecordProblem) else snapshot.map
            while time.monotonic() < due and not (self.ending.is_set() or gone.done()):
                await asyncio.sleep(NAP_SECONDS)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _event(shown: ShownCache, before: ChunkMap | None, snapshot: BuildMoment | RecordProblem) -> dict[str, object]:
    if isinstance(snapshot, RecordProblem):
        return {"map": snapshot}
    event: dict[str, object] = {"live": snapshot.live} | ({} if snapshot.map == before else {"map": snapshot.map})
    return event if before is not None else event | {"history": list(shown.watch.history)}


MOST_CONNECTIONS = 256  # more get 503


@dataclass(frozen=True)
class Address:
    """The address of a viewer."""

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
            timeout_graceful_shutdown=2, ws="none", limit_concurrency=MOST_CONNECTIONS,
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
