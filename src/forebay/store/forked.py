"""Read a store from a forked process through the process that opened it.

Libraries that run their own threads hang in a forked process. So the process that opened the store answers for it: a
thread there listens on a socket, from the first fork on.

    forked process ── {"method": "read", "key": …} ──▶ socket ──▶ thread of the parent ──▶ store
                   ◀── {"size": n} and n bytes, or {"error": …} ──
"""

import atexit
import itertools
import json
import os
import shutil
import socket
import tempfile
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, Protocol

from forebay import errors
from forebay.errors import ForebayError, StoreRefused, StoreUnavailable
from forebay.store.base import Buffer, Entry, Expected, Missing, Store

_process = object()  # identifies this process
_numbers = itertools.count()  # of stores; an `id` is used again, and a forked process would read another store
_stores: "weakref.WeakValueDictionary[int, ThroughParent]" = weakref.WeakValueDictionary()
_server: "_Server | None" = None
_SECONDS = 600.0  # to wait for an answer; a slow line may take long for one range


class ThroughParent(Store):
    """A store as its own process and the forked ones use it; forked ones cannot write."""

    def __init__(self, store: Store) -> None:
        self.address = store.address
        self._store = store
        self._process = _process
        self._server: str | None = None  # path of the socket, known to forked processes
        self._number = next(_numbers)
        _stores[self._number] = self

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        if self._is_here:
            return self._store.read(key, start, stop)
        return self._ask("read", key, start, stop)

    def view(self, key: str, *, expect: Expected | None = None) -> memoryview:
        return self._store.view(key, expect=expect) if self._is_here else super().view(key, expect=expect)

    def entries(self, prefix: str) -> Iterator[Entry]:
        if self._is_here:
            return self._store.entries(prefix)
        return (Entry(*each) for each in json.loads(self._ask("entries", prefix)))

    def folders(self, prefix: str) -> list[str]:
        return self._store.folders(prefix) if self._is_here else super().folders(prefix)

    def head(self, key: str) -> Entry | None:
        return self._store.head(key) if self._is_here else super().head(key)

    def create(self, key: str, data: Sequence[Buffer], *, durable: bool = True) -> bool:
        return self._writable().create(key, data, durable=durable)

    def replace(self, key: str, data: Sequence[Buffer], *, if_etag: str | None = None, durable: bool = True) -> bool:
        return self._writable().replace(key, data, if_etag=if_etag, durable=durable)

    def delete(self, key: str, *, if_etag: str | None = None) -> None:
        self._writable().delete(key, if_etag=if_etag)

    def leftovers(self) -> Iterator[Entry]:
        return self._store.leftovers() if self._is_here else iter(())

    def free_bytes(self) -> int | None:
        return self._store.free_bytes() if self._is_here else None

    @property
    def _is_here(self) -> bool:
        return self._process is _process

    def _writable(self) -> Store:
        if not self._is_here:
            problem = "this process was forked from the one that opened it, and can only read"
            raise StoreRefused(self.address, problem, "start the process with the method 'spawn', and open it there")
        return self._store

    def _ask(self, method: str, *arguments: Any) -> bytes:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(_SECONDS)
                connection.connect(self._server or "")
                request = {"store": self._number, "method": method, "arguments": arguments}
                with connection.makefile("rwb") as file:
                    file.write(json.dumps(request).encode() + b"\n")
                    file.flush()
                    answer = json.loads(file.readline())
                    if "error" not in answer:
                        return _exactly(file, answer["size"])
        except (OSError, ValueError) as error:
            raise StoreUnavailable(
                self.address,
                "answer",
                f"the process that opened it, and reads it for this forked one, has ended ({error})",
                "keep that process running, or start this one with the method 'spawn'",
            ) from error
        raise _raised(self.address, answer)


class _Server:
    """Answers forked processes, one thread for each request."""

    def __init__(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="forebay-")
        self.path = os.path.join(self.folder, "store")
        self.process = os.getpid()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(self.path)
        self._socket.listen(64)
        threading.Thread(target=self._listen, name="forebay-parent", daemon=True).start()
        atexit.register(self.close)

    def close(self) -> None:
        if os.getpid() == self.process:
            shutil.rmtree(self.folder, ignore_errors=True)

    def close_copy(self) -> None:
        """Close a forked process's copy of the socket."""
        self._socket.close()

    def _listen(self) -> None:
        while True:
            with suppress(OSError):
                connection, _ = self._socket.accept()
                threading.Thread(target=_answer, args=(connection,), name="forebay-answer", daemon=True).start()


def _answer(connection: socket.socket) -> None:
    with suppress(OSError, ValueError, KeyError), connection, connection.makefile("rwb") as file:
        request = json.loads(file.readline())
        store = _stores[request["store"]]
        try:
            value = _performed(store, request["method"], request["arguments"])
        except (ForebayError, Missing, OSError) as error:
            file.write(json.dumps(_described(error)).encode() + b"\n")
            return
        file.write(json.dumps({"size": len(value)}).encode() + b"\n")
        file.write(value)


def _performed(store: ThroughParent, method: str, arguments: list[Any]) -> bytes:
    if method == "entries":
        found = [[entry.key, entry.size, entry.etag, entry.written] for entry in store.entries(*arguments)]
        return json.dumps(found).encode()
    return store.read(*arguments)


def _described(error: BaseException) -> dict[str, Any]:
    if isinstance(error, StoreUnavailable):
        return {"error": "StoreUnavailable", "arguments": [error.address, error.what, error.cause, error.advice]}
    if isinstance(error, StoreRefused):
        return {"error": "StoreRefused", "arguments": [str(error)]}
    return {"error": type(error).__name__, "arguments": [str(error)]}


def _raised(address: str, answer: dict[str, Any]) -> Exception:
    name, arguments = answer["error"], answer["arguments"]
    if name == "Missing":
        return Missing(*arguments)
    if name == "StoreUnavailable":
        return errors.StoreUnavailable(*arguments)
    return StoreRefused(address, f"{name}: {arguments[0]}", "see the message of the process that opened it")


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


def _exactly(file: _Readable, size: int) -> bytes:
    value = file.read(size)
    if len(value) != size:
        raise OSError("the answer was cut short")
    return value


def _before_fork() -> None:
    global _server
    here = [store for store in list(_stores.values()) if store._is_here]
    if not here:
        return
    if _server is None:
        _server = _Server()
    for store in here:
        store._server = _server.path


def _after_fork() -> None:
    global _process, _server
    _process = object()
    if _server is not None:
        _server.close_copy()
    _server = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork)
