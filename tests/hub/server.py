"""A hub on this machine: the answers of the Hugging Face hub that forebay asks for, and every way to spoil them.

    with HubServer() as hub:
        hub.add("org/set", {"data/train-0.parquet": shard})
        hub.spoil("train-0", Drop(after=1000), Status(503, {"Retry-After": "1"}))   # the next two answers

Each spoiling is used up by one answer to a GET request whose path and range (`/datasets/… bytes=0-99`, or `None` for
the whole file) contain the words given; words that begin with `HEAD ` are for HEAD requests.
"""

import hashlib
import json
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

PAGE = 3  # entries of a listing per page; the real hub gives 1,000


@dataclass(frozen=True)
class Drop:
    """The connection breaks after so many bytes of the body."""

    after: int


@dataclass(frozen=True)
class Truncate:
    """The body ends early, and nothing says that more was meant."""

    after: int


@dataclass(frozen=True)
class Stall:
    """After so many bytes nothing more comes."""

    after: int


@dataclass(frozen=True)
class Status:
    code: int
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Flip:
    """One bit of the body, counted from its beginning, is another."""

    at: int


@dataclass(frozen=True)
class IgnoreRange:
    """The whole file is given, whatever was asked; it breaks off where `after` says so."""

    after: int | None = None


@dataclass(frozen=True)
class Retag:
    """The file has another ETag."""

    etag: str


Spoiling = Drop | Truncate | Stall | Status | Flip | IgnoreRange | Retag


@dataclass(frozen=True)
class Request:
    path: str
    range: str | None
    authorization: str | None
    method: str = "GET"


class HubServer:
    """Repositories with one commit each. `private` ones want the token."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.go = threading.Event()
        self.reached = threading.Event()  # a `Stall` was reached
        self.elsewhere: HubServer | None = None  # where large files are given from
        self.token: str | None = None
        self.on_request: Callable[[Request], None] = lambda request: None
        self._blobs: dict[str, bytes] = {}
        self._repositories: dict[str, tuple[str, dict[str, bytes]]] = {}
        self._large: tuple[str, ...] = (".parquet",)
        self._spoilings: list[tuple[str, list[Spoiling]]] = []
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.hub = self
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))

    def __enter__(self) -> "HubServer":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.go.set()
        self._server.shutdown()
        self._server.end_connections()
        self._server.server_close()
        self._thread.join()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def add(self, name: str, files: Mapping[str, bytes], kind: str = "datasets") -> str:
        """Have a repository, or another commit of it; the commit."""
        tree = json.dumps({path: hashlib.sha256(content).hexdigest() for path, content in sorted(files.items())})
        commit = hashlib.sha1(f"{kind}/{name}{tree}".encode()).hexdigest()
        self._repositories[f"{kind}/{name}"] = (commit, dict(files))
        self._repositories[f"{kind}/{name}@{commit}"] = (commit, dict(files))
        return commit

    def spoil(self, words: str, *spoilings: Spoiling) -> None:
        with self._lock:
            self._spoilings.append((words, list(spoilings)))

    @property
    def unspent(self) -> int:
        """How many spoilings nobody met."""
        return sum(len(spoilings) for _, spoilings in self._spoilings)

    def asked(self, words: str) -> list[Request]:
        """The GET requests with these words in their path."""
        return [request for request in self.requests if words in request.path and request.method == "GET"]

    def forgive(self) -> None:
        """No more of what was to be spoiled."""
        with self._lock:
            self._spoilings.clear()

    def next_spoiling(self, request: Request) -> Spoiling | None:
        with self._lock:
            for words, spoilings in self._spoilings:
                is_meant = words.startswith("HEAD ") == (request.method == "HEAD")
                if is_meant and words.removeprefix("HEAD ") in f"{request.path} {request.range}" and spoilings:
                    return spoilings.pop(0)
        return None

    def answer(self, path: str, query: Mapping[str, list[str]]) -> "tuple[int, dict[str, str], bytes]":
        """Status, headers and body for a path."""
        parts = unquote(path).strip("/").split("/")
        if parts[0] == "blobs":
            return 200, {"ETag": f'"{parts[1]}"'}, self._blobs[parts[1]]
        if parts[0] == "api":
            return self._answer_api(parts, query)
        kind, rest = ("datasets", parts[1:]) if parts[0] == "datasets" else ("models", parts)
        return self._answer_file(kind, "/".join(rest[:2]), rest[3], "/".join(rest[4:]))

    def _answer_api(self, parts: list[str], query: Mapping[str, list[str]]) -> "tuple[int, dict[str, str], bytes]":
        name, verb, revision = "/".join(parts[2:4]), parts[4], "/".join(parts[5:])
        found = self._find(parts[1], name, revision)
        if isinstance(found, str):
            return 404, {"X-Error-Code": found, "X-Error-Message": f"no {name} at {revision}"}, b""
        commit, files = found
        if verb == "revision":
            return 200, {}, json.dumps({"id": name, "sha": commit}).encode()
        entries = [{"type": "directory", "path": "data", "oid": "0" * 40}]
        entries += [self._entry(path, content) for path, content in sorted(files.items(), reverse=True)]
        start = int(query.get("cursor", ["0"])[0])
        following = f'<https://elsewhere.invalid/api?cursor={start + PAGE}>; rel="next"'
        headers = {"Link": following} if start + PAGE < len(entries) else {}
        return 200, headers, json.dumps(entries[start : start + PAGE]).encode()

    def _answer_file(self, kind: str, name: str, revision: str, path: str) -> "tuple[int, dict[str, str], bytes]":
        found = self._find(kind, name, revision)
        if isinstance(found, str) or path not in found[1]:
            return 404, {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"}, b""
        content = found[1][path]
        sha256 = hashlib.sha256(content).hexdigest()
        headers = {"X-Repo-Commit": found[0], "X-Linked-Etag": f'"{sha256}"', "X-Linked-Size": str(len(content))}
        if self.elsewhere is not None and path.endswith(self._large):
            self.elsewhere._blobs[sha256] = content
            return 302, {"Location": f"{self.elsewhere.address}/blobs/{sha256}", **headers}, b""
        return 200, {"ETag": f'"{sha256}"', **headers}, content

    def _find(self, kind: str, name: str, revision: str) -> tuple[str, dict[str, bytes]] | str:
        known = self._repositories.get(f"{kind}/{name}")
        if known is None:
            return "RepoNotFound"
        if revision == "main":
            return known
        return self._repositories.get(f"{kind}/{name}@{revision}", "RevisionNotFound")

    def _entry(self, path: str, content: bytes) -> dict[str, Any]:
        entry: dict[str, Any] = {"type": "file", "path": path, "size": len(content), "oid": blob_hash(content)}
        if path.endswith(self._large):
            sha256 = hashlib.sha256(content).hexdigest()
            entry |= {"oid": "1" * 40, "lfs": {"oid": sha256, "size": len(content), "pointerSize": 130}}
        return entry


def blob_hash(content: bytes) -> str:
    """The name that git gives a file of this content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class _Server(ThreadingHTTPServer):
    daemon_threads = False  # so that closing waits for every answer
    hub: HubServer

    def __init__(self, *arguments: Any) -> None:
        self._connections: set[socket.socket] = set()
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is what these tests are about."""

    def end_connections(self) -> None:
        for connection in list(self._connections):
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # it ended by itself


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def log_message(self, format: str, *arguments: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub = self.server.hub
        request = Request(self.path, self.headers.get("Range"), self.headers.get("Authorization"), self.command)
        hub.requests.append(request)
        hub.on_request(request)
        parts = urlsplit(self.path)
        spoiling = hub.next_spoiling(request)
        if isinstance(spoiling, Status):
            self._send(spoiling.code, {**spoiling.headers}, b"")
            return
        if hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}":
            self._send(401, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}, b"")
            return
        status, headers, body = hub.answer(parts.path, parse_qs(parts.query))
        if status == 200 and not parts.path.startswith("/api"):
            status, headers, body = self._ranged(headers, body, spoiling)
        self._send(status, headers, body, spoiling)

    def _ranged(
        self, headers: dict[str, str], body: bytes, spoiling: Spoiling | None
    ) -> tuple[int, dict[str, str], bytes]:
        if isinstance(spoiling, Retag):
            headers["ETag"] = spoiling.etag
        asked = self.headers.get("Range")
        if asked is None or isinstance(spoiling, IgnoreRange):
            return 200, headers, body
        first, _, last = asked.removeprefix("bytes=").partition("-")
        start, stop = int(first), min(int(last) + 1, len(body)) if last else len(body)
        if start >= len(body):
            return 416, {"Content-Range": f"bytes */{len(body)}"}, b""
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(body)}"
        return 206, headers, body[start:stop]

    def _send(self, status: int, headers: Mapping[str, str], body: bytes, spoiling: Spoiling | None = None) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if isinstance(spoiling, Truncate):
            self.send_header("Connection", "close")
            body = body[: spoiling.after]
        else:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if isinstance(spoiling, Flip):
            body = bytes([*body[: spoiling.at], body[spoiling.at] ^ 1, *body[spoiling.at + 1 :]])
        after = getattr(spoiling, "after", None)
        if isinstance(spoiling, Truncate) or after is None:
            self.wfile.write(body)
            return
        self.wfile.write(body[:after])
        self.wfile.flush()
        if isinstance(spoiling, Stall):
            self.server.hub.reached.set()
            self.server.hub.go.wait(60)
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)
