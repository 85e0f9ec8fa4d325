"""A folder as the bucket `b` of an S3 service on loopback, which only serves: what a stranger would let others open."""

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from hashlib import md5
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape


class FolderBucket(ThreadingHTTPServer):
    """Counts what is written to it, and keeps its own failures; its files are listed once."""

    daemon_threads = True
    writes = 0

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.folder = folder
        self.failures: list[str] = []

    def handle_error(self, request: object, client_address: object) -> None:
        error = sys.exception()
        if not isinstance(error, ConnectionError):  # a client may leave before the end of an answer
            self.failures.append(repr(error))

    @cached_property
    def files(self) -> dict[str, int]:
        """Sizes by name, sorted by name."""
        found = sorted(_files(self.folder))
        return {path.relative_to(self.folder).as_posix(): path.stat().st_size for path in found}

    @property
    def environment(self) -> dict[str, str]:
        return {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.server_port}"}


class _Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FolderBucket

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        asked = urlsplit(self.path)
        query = parse_qs(asked.query)
        if "list-type" in query:
            self._send(200, self._listing(query.get("prefix", [""])[0], "delimiter" in query))
            return
        path = self.server.folder / unquote(asked.path).removeprefix("/b/")
        if not path.is_file() or path.is_symlink():
            self._send(404, b"<Error><Code>NoSuchKey</Code></Error>")
            return
        content = path.read_bytes()
        wanted = self.headers.get("Range", "").removeprefix("bytes=").partition("-")
        if not wanted[1]:
            self._send(200, content)
            return
        start, stop = int(wanted[0] or 0), min(int(wanted[2] or 1 << 62) + 1, len(content))
        status, part = (206, content[start:stop]) if start < len(content) else (416, b"")
        self._send(status, part, {"Content-Range": f"bytes {start}-{stop - 1}/{len(content)}"}, etag=content)

    do_HEAD = do_GET

    def do_PUT(self) -> None:
        self.server.writes += 1
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._send(403, b"<Error><Code>AccessDenied</Code></Error>")

    do_POST = do_DELETE = do_PUT

    def _listing(self, prefix: str, is_flat: bool) -> bytes:
        found, folders = [], set()
        for name, size in self.server.files.items():
            if not name.startswith(prefix):
                continue
            if is_flat and "/" in name[len(prefix) :]:
                folders.add(prefix + name[len(prefix) :].partition("/")[0] + "/")
                continue
            found.append(
                f"<Contents><Key>{_text(name)}</Key><Size>{size}</Size><ETag>&quot;x&quot;</ETag>"
                "<LastModified>2026-11-16T17:00:00.000Z</LastModified></Contents>"
            )
        commons = [f"<CommonPrefixes><Prefix>{_text(each)}</Prefix></CommonPrefixes>" for each in sorted(folders)]
        return f"<?xml version='1.0'?><ListBucketResult>{''.join([*found, *commons])}</ListBucketResult>".encode()

    def _send(self, status: int, body: bytes, fields: dict[str, str] | None = None, etag: bytes | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{md5(body if etag is None else etag).hexdigest()}"')
        self.send_header("Last-Modified", "Mon, 16 Nov 2026 17:00:00 GMT")
        for name, value in (fields or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else body)


def _files(folder: Path) -> Iterator[Path]:
    folders = [folder]
    while folders:  # not `os.walk`, which recurses: a crafted cache has deeper folders than a stack
        with suppress(OSError), os.scandir(folders.pop()) as entries:  # names that are too long
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(Path(entry))
                elif entry.is_file(follow_symlinks=False):
                    yield Path(entry)


def _text(name: str) -> str:
    return escape(name.encode("utf-8", "replace").decode()).replace("\x1b", "").replace("\0", "")


@contextmanager
def folder_bucket(folder: Path) -> Iterator[FolderBucket]:
    server = FolderBucket(folder)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
