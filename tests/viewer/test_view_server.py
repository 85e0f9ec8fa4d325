"""A server under bad conditions: slow clients, many of them, long rows, a cache that changes or disappears."""

import json
import shutil
import socket
import sys
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path

import numpy as np
import pytest
from tests.builders import wait_until
from tests.teachers.own_teachers import Ramp, prompt_cache
from tests.viewer.test_view_security import ask, served

import forebay as fb
from forebay.teachers import TeacherRecipe
from forebay.viewer import token_rows, web_app
from forebay.viewer.page_records import ENDPOINTS
from forebay.viewer.shown_cache import Query, ShownCache
from forebay.viewer.token_rows import token_row, token_texts, vocabulary_of
from forebay.viewer.web_app import Server


@pytest.fixture
def server(token_root: Path) -> Iterator[Server]:
    with served(token_root) as running:
        yield running


def connected(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.address.port), timeout=600)


def test_a_request_that_does_not_arrive_is_dropped(monkeypatch: pytest.MonkeyPatch, server: Server) -> None:
    monkeypatch.setattr(web_app, "REQUEST_SECONDS", 0.3)
    with connected(server) as silent, connected(server) as slow:
        slow.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n")  # the head never ends
        for one in (silent, slow):
            assert not received(one)
    assert ask(server, "/")[0] == 200


def test_a_half_sent_second_request_is_dropped_too(monkeypatch: pytest.MonkeyPatch, server: Server) -> None:
    monkeypatch.setattr(web_app, "REQUEST_SECONDS", 0.3)
    with connected(server) as kept:
        kept.sendall(b"GET /static/icon.svg HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"<svg" in until(kept, b"</svg>")
        kept.sendall(b"GET / HT")
        assert not received(kept)


@pytest.mark.parametrize("close", ["keep-alive", "close"])
def test_an_answer_that_nobody_reads_is_dropped(
    monkeypatch: pytest.MonkeyPatch, server: Server, tmp_path: Path, close: str
) -> None:
    statistics = tmp_path / "statistics.json"
    statistics.write_text(json.dumps({"value": "x" * 8_000_000}))  # more than the kernel takes
    server._caches[0].statistics = (str(statistics),)
    monkeypatch.setattr(web_app, "ANSWER_SECONDS", 0.5)
    with socket.socket() as silent:
        silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        silent.settimeout(30)
        silent.connect(("127.0.0.1", server.address.port))
        silent.sendall(
            f"GET /api/0/statistics.json HTTP/1.1\r\nHost: localhost\r\nConnection: {close}\r\n\r\n".encode()
        )
        wait_until(lambda: server._server.server_state.connections, what="no connection was made")
        wait_until(lambda: not server._server.server_state.connections, what="the connection is still open")
        total = 0
        while found := received(silent):
            total += len(found)
        assert total < 8_000_000
    assert len(ask(server, "/api/0/statistics.json")[1]) > 8_000_000  # who reads gets all of it


def test_events_that_nobody_reads_end(monkeypatch: pytest.MonkeyPatch, server: Server) -> None:
    monkeypatch.setattr(web_app, "ANSWER_SECONDS", 0.5)
    monkeypatch.setattr(web_app, "_event", lambda *_: {"live": "x" * 2_000_000})
    with connected(server) as silent, connected(server) as reader:
        for one in (silent, reader):
            one.sendall(b"GET /api/0/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        while received(reader) and len(server._server.server_state.connections) > 1:
            pass
        assert until(reader, b"data: ")  # who reads gets more


def received(one: socket.socket) -> bytes:
    """What the server sends; empty when it closed or reset the connection."""
    try:
        return one.recv(65536)
    except ConnectionResetError:
        return b""


def until(one: socket.socket, end: bytes) -> bytes:
    found = b""
    while end not in found:
        more = one.recv(65536)
        assert more, "the connection was closed"
        found += more
    return found


def test_there_are_only_so_many_connections(monkeypatch: pytest.MonkeyPatch, server: Server) -> None:
    monkeypatch.setattr(web_app, "MOST_CONNECTIONS", 3)
    streams = []
    for _ in range(3):
        streams.append(connected(server))
        streams[-1].sendall(b"GET /api/0/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        until(streams[-1], b"data: ")
    with connected(server) as one:
        assert not received(one)
    until(streams[0], b"data: ")  # those that are open continue
    for stream in streams:
        stream.close()


def test_answers_are_sent_at_once(server: Server) -> None:
    assert server._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_server_stops_quietly_while_events_are_sent(token_root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with served(token_root) as server:
        stream = connected(server)
        stream.sendall(b"GET /api/0/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        until(stream, b"data: ")
    stream.close()
    assert capfd.readouterr().err == ""


def test_the_head_of_a_stream_of_events_has_no_events(server: Server) -> None:
    assert ask(server, "/api/0/live", "HEAD")[:2] == (200, "")


def test_a_long_row_is_shown_in_parts(monkeypatch: pytest.MonkeyPatch, token_root: Path) -> None:
    shown = ShownCache.of(token_root)
    whole = token_row(shown, Query((("row", "1"),)))
    assert (whole.first, whole.length, len(whole.tokens)) == (0, 128, 128)
    monkeypatch.setattr(token_rows, "MOST_SHOWN", 50)
    parts = [token_row(shown, Query((("row", "1"), ("token", str(at))))) for at in (0, 50, 127)]
    assert [part.first for part in parts] == [0, 50, 100]
    for name in ("tokens", "texts", "documents", "positions", "labels"):
        assert [one for part in parts for one in getattr(part, name)] == getattr(whole, name)
    assert parts[0].seq_lens == whole.seq_lens
    assert parts[0].blocks == whole.blocks
    assert token_row(shown, Query((("row", "1"), ("token", "999999")))).first == 100


def test_texts_of_a_part_are_those_of_the_row(token_root: Path) -> None:
    cache = fb.open_cache(token_root)
    row = cache[0]
    tokens, lengths = np.asarray(row["tokens"]), np.asarray(row["seq_lens"])
    whole = token_texts(vocabulary_of(cache), tokens, lengths)
    for start, stop in ((0, 3), (2, 60), (40, 128), (127, 128)):
        assert token_texts(vocabulary_of(cache), tokens, lengths, slice(start, stop)) == whole[start:stop]


def test_no_request_fails_while_generations_and_then_the_cache_are_removed(tmp_path: Path) -> None:
    root = prompt_cache(tmp_path, tuple(f"prompt {number}" for number in range(12)), chunk_bytes=60)
    fb.build(root, None, TeacherRecipe(teacher=Ramp(width=4)))
    addresses = [f"/api/0/{name}.json?row=3&layer=ramp&chunk=1&text=a&path=a" for name in ENDPOINTS]
    addresses += ["/api/caches.json", "/api/compare.json"]
    found: list[tuple[int, str]] = []
    changed = threading.Event()
    with served(root) as server:

        def keep_asking() -> None:
            rounds = 0
            while rounds < 2:
                rounds += changed.is_set()
                found.extend(ask(server, address)[:2] for address in addresses)

        askers = [threading.Thread(target=keep_asking) for _ in range(3)]
        for asker in askers:
            asker.start()
        fb.build(root, None, TeacherRecipe(teacher=Ramp(width=4, name="second")))
        fb.clean(root, keep_generations=1)
        shutil.rmtree(root)
        changed.set()
        for asker in askers:
            asker.join()
        stream = connected(server)
        stream.sendall(b"GET /api/0/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        until(stream, b"data: ")
        stream.close()
    assert {status for status, _ in found} <= {200, 400, 404}
    assert "Traceback" not in "".join(text for _, text in found)


def test_a_name_on_the_map_that_is_no_layer_is_said_plainly(server: Server) -> None:
    connection_ = HTTPConnection("127.0.0.1", server.address.port, timeout=600)
    connection_.request("GET", "/api/0/teacher.json?layer=nothing")
    answer = connection_.getresponse()
    assert answer.status == 400
    assert "'layer' must be one of none" in answer.read().decode()
    connection_.close()


def test_records_stay_json_where_numbers_are_missing(server: Server) -> None:
    json.loads(ask(server, "/api/0/row.json?row=0")[1], parse_constant=sys.exit)
