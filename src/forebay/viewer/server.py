"""The server of `forebay view`: the application of `forebay.viewer.web_app` on a port, in a thread.

One connection of the viewer's server: a request has to arrive in time, an answer has to be read in time, and the
number of connections is limited.

uvicorn waits for both for ever: clients that send a byte now and then, or read nothing, would use up its files and keep
their answers in its memory.
"""

import asyncio
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from forebay.errors import LibraryMissing
from forebay.preview.row_records import Viewing
from forebay.viewer.shown_cache import ShownCache
from forebay.viewer.web_app import LOOPBACK, Guard, WebApp, known_names

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


try:
    import uvicorn

    from forebay.viewer.server import Connection
except ModuleNotFoundError as missing:
    raise LibraryMissing(missing.name or "uvicorn", "`forebay view`", "viewer") from missing


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
