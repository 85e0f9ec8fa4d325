"""Faults of what lies beside a cache: a tier's LMDB files, and what a download keeps on disk.

A hub of this process's own serves one small data set; the first part of a path says how it misbehaves.
"""

import ctypes
import functools
import hashlib
import importlib
import io
import json
import multiprocessing
import os
import random
import signal
import socket
import sys
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.parquet as pq

import forebay as fb
from forebay.errors import ForebayError
from forebay.preview.words import harmless

COMMIT = "c" * 40
SHARDS = 2
_DIE_WITH_PARENT = 1  # of prctl
# --- downloads -------------------------------------------------------------------------------------------------------


class Hub(BaseHTTPRequestHandler):
    """A data set of two shards. `/SEED/…`: whether an answer breaks off, lies or fails follows from SEED; 0: never."""

    protocol_version = "HTTP/1.1"
    files: dict[str, bytes]
    asked: ClassVar[Counter[str]] = Counter()  # how often, by seed

    def log_message(self, format: str, *arguments: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        _, seed, *parts = urlsplit(self.path).path.split("/")
        Hub.asked[seed] += 1
        draw = random.Random(f"{seed} {Hub.asked[seed]}")
        how = draw.choice(("right", "right", "drop", "flip", "busy", "all")) if seed != "0" else "right"
        if how == "busy":
            self._send(503, {"Retry-After": "0"}, b"")
        elif parts[0] == "api":
            self._send(200, {}, self._listing(parts))
        else:
            self._send_file(draw, how, "/".join(parts[5:]))

    def _listing(self, parts: list[str]) -> bytes:
        if "revision" in parts:
            return json.dumps({"id": "org/set", "sha": COMMIT}).encode()
        return json.dumps([_entry(name, content) for name, content in self.files.items()]).encode()

    def _send_file(self, draw: random.Random, how: str, name: str) -> None:
        content = self.files.get(name)
        if content is None:
            self._send(404, {"X-Error-Code": "EntryNotFound"}, b"")
            return
        asked = self.headers.get("Range")
        headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": COMMIT}
        status, body = 200, content
        if asked is not None and how != "all":
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start, stop = int(first), min(int(last) + 1, len(content)) if last else len(content)
            status, body = 206, content[start:stop]
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
        at = draw.randrange(max(1, len(body)))
        if how == "flip" and body:
            body = body[:at] + bytes([body[at] ^ 1 << draw.randrange(8)]) + body[at + 1 :]
        self._send(status, headers, body, at if how == "drop" else None)

    def _send(self, status: int, headers: dict[str, str], body: bytes, after: int | None = None) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(body[:after])
        if after is not None:
            self.wfile.flush()
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that was killed is what this is for."""


def _entry(name: str, content: bytes) -> dict[str, Any]:
    blob = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
    entry: dict[str, Any] = {"type": "file", "path": name, "size": len(content), "oid": blob}
    if name.endswith(".parquet"):
        entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
    return entry


def _shard(number: int) -> bytes:
    draw = random.Random(number)
    texts = [" ".join(draw.choices(("river", "stone", "cloud", "seed"), k=draw.randrange(4, 40))) for _ in range(40)]
    out = io.BytesIO()
    pq.write_table(pa.table({"text": texts}), out, row_group_size=10)
    return out.getvalue()


@functools.cache
def start_hub() -> str:
    """The address of a hub in a process of its own, which ends with this one."""
    Hub.files = {f"data/train-{number}.parquet": _shard(number) for number in range(SHARDS)}
    server = _Server(("127.0.0.1", 0), Hub)
    multiprocessing.get_context("fork").Process(target=_serve, args=(server,), daemon=True).start()
    address = f"http://127.0.0.1:{server.server_address[1]}"
    server.socket.close()  # the child has it
    return address


def _serve(server: _Server) -> None:
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)  # also where the parent is killed
    server.serve_forever()


def build_from_hub(root: Path, place: Path, seed: str, vocabulary: str) -> None:
    """Build tokens of the data set, with everything that downloads keep below `place`; an error is said in a line."""
    os.environ["HF_HOME"] = str(place / "home")
    shards = importlib.import_module("forebay.sources.hub_datasets")  # now: its library reads the environment at import
    patience = shards.RetryPolicy(retries=30, timeout=5, first_wait=0.001, longest_wait=0.05)
    address = f"{start_hub()}/{seed}"
    source = shards.HubSource("org/set", None, "train", "text", COMMIT, address, str(place / "spool"), patience)
    recipe = fb.TokenRecipe(tokenizer=vocabulary, sequence_length=64, chunk_rows=8)
    try:
        fb.build(root, source, recipe, workers=0, lease_seconds=0.3)
    except ForebayError as error:
        print(harmless(f"forebay: {error}"))
        sys.exit(1)
