"""A server under bad conditions: many clients, long rows, a cache that changes or disappears."""

import json
import shutil
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.teachers.own_teachers import Ramp, prompt_cache
from tests.viewer.test_view_security import ask, served

import forebay as fb
from forebay.teachers import TeacherRecipe
from forebay.viewer import token_rows, web_app
from forebay.viewer.page_records import ENDPOINTS
from forebay.viewer.shown_cache import Query, ShownCache
from forebay.viewer.token_rows import token_row
from forebay.viewer.web_app import Server


@pytest.fixture
def server(token_root: Path) -> Iterator[Server]:
    with served(token_root) as running:
        yield running


def connected(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.address.port), timeout=600)


def until(one: socket.socket, end: bytes) -> bytes:
    found = b""
    while end not in found:
        more = one.recv(65536)
        assert more, "the connection was closed"
        found += more
    return found


def test_connections_beyond_the_limit_get_503(monkeypatch: pytest.MonkeyPatch, token_root: Path) -> None:
    monkeypatch.setattr(web_app, "MOST_CONNECTIONS", 3)
    with served(token_root) as server:
        streams = []
        for _ in range(2):
            streams.append(connected(server))
            streams[-1].sendall(b"GET /api/0/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
            until(streams[-1], b"data: ")
        with connected(server) as one:
            one.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b"503" in until(one, b"\r\n")
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
    assert token_row(shown, Query((("row", "1"), ("token", "999999")))).first == 100


@pytest.mark.slow
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
    status, text, _ = ask(server, "/api/0/teacher.json?layer=nothing")
    assert status == 400
    assert "'layer' must be one of none" in text


def test_records_stay_json_where_numbers_are_missing(server: Server) -> None:
    json.loads(ask(server, "/api/0/row.json?row=0")[1], parse_constant=sys.exit)
