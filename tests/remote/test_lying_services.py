"""A service that lies or redirects: bounded in memory and time, and no host is asked that the user did not name."""

import hashlib
import os
import threading
import tracemalloc
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path

import pytest
from tests.remote.servers import s3_environment

from forebay.errors import StoreFull, StoreRefused, StoreUnavailable
from forebay.store import LocalStore, bucket_client, object_store, open_store
from forebay.store.base import BadCopy, Expected
from forebay.store.tiered import TieredStore

TOKEN = "session-token-never-sent-elsewhere"
LARGE = 64 << 20


class Lying(BaseHTTPRequestHandler):
    """Answers every listing with the next page of its server, and every read with zeros, or redirects both."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def _any(self):
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.requests.append((self.command, self.path, self.headers.get("x-amz-security-token")))
        if self.server.redirect:
            self._head(self.server.status, 0, Location=self.server.redirect + self.path)
        elif "list-type" in self.path:
            body = page(next(self.server.pages))
            self._head(200, len(body))
            self.wfile.write(body)
        else:
            start, _, stop = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
            size = min(int(stop or LARGE - 1) + 1, LARGE) - int(start)
            ranged = {"Content-Range": f"bytes {start}-{int(start) + size - 1}/{LARGE}"}
            self._head(206 if "Range" in self.headers else 200, size, ETag='"x"', **ranged)
            for at in range(0, 0 if self.command == "HEAD" else size, 1 << 20):
                self.wfile.write(bytes(min(1 << 20, size - at)))

    def _head(self, status, length, **fields):
        self.send_response(status)
        for name, value in {"Last-Modified": "Mon, 16 Nov 2026 17:00:00 GMT", **fields}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(length))
        self.end_headers()

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _any


class LastPage(list[str]):
    """Keys after which a listing ends."""


def page(keys: list[str]) -> bytes:
    """A page of a listing."""
    found = "".join(
        f"<Contents><Key>{key}</Key><LastModified>2026-11-16T17:00:00Z</LastModified><ETag>x</ETag><Size>3</Size>"
        "</Contents>"
        for key in keys
    )
    is_last = isinstance(keys, LastPage)
    more = "" if is_last else "<IsTruncated>true</IsTruncated><NextContinuationToken>t</NextContinuationToken>"
    return f"<?xml version='1.0'?><ListBucketResult>{more}{found}</ListBucketResult>".encode()


class LyingServer(ThreadingHTTPServer):
    def handle_error(self, *_):
        """Clients hang up on purpose."""


def serving(host: str) -> ThreadingHTTPServer:
    server = LyingServer((host, 0), Lying)
    server.requests, server.redirect, server.status, server.pages = [], "", 307, iter(())
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


@pytest.fixture
def service(monkeypatch) -> Iterator[ThreadingHTTPServer]:
    server = serving("127.0.0.1")
    for name, value in s3_environment(f"http://127.0.0.1:{server.server_port}").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_SESSION_TOKEN", TOKEN)
    for name in bucket_client._PROXIES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    monkeypatch.setattr(bucket_client, "_RETRIES", {"max_retries": 1})
    monkeypatch.setattr(object_store, "PAGE_ENTRIES", 10)
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def elsewhere() -> Iterator[ThreadingHTTPServer]:
    """A host that nobody named."""
    server = serving("127.0.0.2")
    yield server
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("status", [301, 307])
def test_a_redirect_to_another_host_is_refused_and_nothing_is_sent_there(service, elsewhere, status, tmp_path):
    service.redirect, service.status = f"http://127.0.0.2:{elsewhere.server_port}", status
    store = open_store("s3://bucket/cache")
    requests = [
        lambda: store.read("cache.json"),
        lambda: store.view("layers/a/000000.safetensors", expect=Expected(LARGE, bytes(32))),
        lambda: store.head("cache.json"),
        lambda: list(store.entries("layers/")),
        lambda: store.folders(""),
        lambda: store.create("cache.json", [b"x"]),
        lambda: store.replace("cache.json", [b"x"]),
        lambda: store.delete("cache.json"),
    ]
    for ask in requests:
        with pytest.raises(StoreRefused, match=r"redirects to a host that you did not name|another region"):
            ask()
    assert service.requests
    assert service.requests[0][2] == TOKEN
    assert elsewhere.requests == []


def test_a_redirect_to_the_same_host_is_followed(service):
    other = serving("127.0.0.1")
    service.redirect = f"http://127.0.0.1:{other.server_port}"
    assert open_store("s3://bucket/cache").head("cache.json").size == LARGE
    assert len(other.requests) == 1
    other.shutdown()
    other.server_close()


@pytest.mark.parametrize("keys", [["a"], ["b", "a"], [f"a{number:03}" for number in range(30)]])
@pytest.mark.parametrize("method", ["walk", "entries"])
def test_a_listing_that_repeats_its_pages_is_refused(service, keys, method):
    service.pages = iter(lambda: keys, None)
    with pytest.raises(StoreRefused, match=r"its listing repeats '[ab]"):
        list(getattr(open_store("s3://bucket"), method)(""))


@pytest.mark.parametrize("method", ["walk", "entries"])
def test_a_listing_without_end_is_refused(service, method, monkeypatch):
    monkeypatch.setattr(object_store, "MOST_LISTED", 1000)
    monkeypatch.setattr(object_store, "MOST_ENTRIES", 1000)
    service.pages = ([f"a{number:09}-{each}" for each in range(100)] for number in count())
    with pytest.raises(StoreRefused, match="its listing has more than 1,000 objects"):
        list(getattr(open_store("s3://bucket"), method)(""))


def test_a_listing_of_empty_pages_ends(service, monkeypatch):
    monkeypatch.setattr(object_store, "LISTING_SECONDS", 0.5)
    service.pages = iter(list, None)
    with pytest.raises(StoreUnavailable, match="no page with an object came in"):
        list(open_store("s3://bucket").walk(""))
    service.pages = iter(())  # the client's thread asks for ever; the server now resets it


@pytest.mark.slow
@pytest.mark.parametrize("pages", [40, pytest.param(1000, marks=pytest.mark.long)])
def test_a_listing_of_many_objects_streams(service, pages, monkeypatch):
    """A page has a thousand objects. Held, they would take 400 bytes each in Python."""
    monkeypatch.setattr(object_store, "PAGE_ENTRIES", 1000)
    names = [[f"{number:07}" for number in range(at, at + 1000)] for at in range(0, 1000 * pages, 1000)]
    service.pages = iter([*names[:-1], LastPage(names[-1])])
    del names
    listing = open_store("s3://bucket").walk("")
    first, grown = next(listing), 0

    def walk() -> None:
        nonlocal grown
        before = resident_bytes()
        assert sum(1 for _ in listing) == 1000 * pages - 1
        grown = resident_bytes() - before

    assert peak_bytes(walk) < 4_000_000
    assert grown < 30_000_000  # also in the client
    assert first.key == "0000000"


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak_bytes(act) -> int:
    tracemalloc.start()
    act()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


@pytest.mark.slow
def test_a_large_object_is_mapped_from_a_file_and_not_held_in_memory(service, tmp_path, monkeypatch):
    monkeypatch.setattr(object_store, "PIECE_BYTES", 1 << 20)
    store, views = open_store("s3://bucket"), []
    expect = Expected(LARGE, hashlib.sha256(bytes(LARGE)).digest())
    tiered = TieredStore(LocalStore(tmp_path / "tier"), store)
    for view in (
        lambda: store.view("layers/a/000000.safetensors", expect=expect),
        lambda: store.view("generations/000000.safetensors"),
        lambda: tiered.view("generations/000000.safetensors"),
        lambda: tiered.view("generations/000000.safetensors"),  # of the tier
    ):
        assert peak_bytes(lambda view=view: views.append(view())) < LARGE // 2
    assert all(len(view) == LARGE and view[-1] == 0 for view in views)
    with pytest.raises(BadCopy):
        store.view("layers/a/000000.safetensors", expect=Expected(LARGE, bytes(32)))


def test_a_full_disk_of_temporary_files_is_one_line(service, monkeypatch):
    def full(*_, **__):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr("tempfile.TemporaryFile", full)
    with pytest.raises(StoreFull, match="the folder of temporary files is full; set TMPDIR"):
        open_store("s3://bucket").view("generations/000000.safetensors")
