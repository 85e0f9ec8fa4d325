"""The server of `forebay view`: the application of `forebay.viewer.web_app` on a port, in a thread."""

import secrets
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from forebay.errors import LibraryMissing
from forebay.viewer.guard import LOOPBACK, Guard, known_names
from forebay.viewer.shown_cache import ShownCache
from forebay.viewer.view_records import Viewing
from forebay.viewer.web_app import WebApp

try:
    import uvicorn

    from forebay.viewer.connection import Connection
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
