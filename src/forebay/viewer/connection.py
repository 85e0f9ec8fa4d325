"""One connection of the viewer's server: a request has to arrive in time, an answer has to be read in time, and the
number of connections is limited.

uvicorn waits for both for ever: clients that send a byte now and then, or read nothing, would use up its files and keep
their answers in its memory.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

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
