"""A small Google Cloud Storage service: the XML interface that object_store uses, with generations and preconditions.

Objects are written by one request, in parts, or as copies of others, each also on condition of their generation.
`python -m tests.remote.gcs_server PORT`. One lock around every request makes conditional writes atomic.
"""

import base64
import hashlib
import re
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from typing import ClassVar
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape


class Service(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    lock: ClassVar[threading.Lock] = threading.Lock()
    # bucket -> key -> (generation, value, metadata)
    buckets: ClassVar[dict[str, dict[str, tuple[int, bytes, dict[str, str]]]]] = {}
    generation: ClassVar[int] = 1_700_000_000_000_000
    numbers: ClassVar[Iterator[int]] = count()  # of uploads: one that is used again would mix the parts of two
    # upload -> (metadata, part number -> value)
    uploads: ClassVar[dict[str, tuple[dict[str, str], dict[int, bytes]]]] = {}

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def _place(self) -> tuple[str, str, dict[str, list[str]]]:
        url = urlsplit(self.path)
        bucket, _, key = unquote(url.path).lstrip("/").partition("/")
        return bucket, key, parse_qs(url.query, keep_blank_values=True)

    def _send(self, status: int, body: bytes = b"", fields: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (fields or {}).items():
            self.send_header(name, value)
        if "Content-Length" not in (fields or {}):
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _error(self, status: int, code: str) -> None:
        self._send(status, f"<?xml version='1.0'?><Error><Code>{code}</Code></Error>".encode())

    def do_PUT(self) -> None:
        bucket, key, query = self._place()
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        with self.lock:
            if not key:
                self.buckets.setdefault(bucket, {})
                self._send(200)
            elif bucket not in self.buckets:
                self._error(404, "NoSuchBucket")
            elif "uploadId" in query:
                self._keep_part(query["uploadId"][0], int(query["partNumber"][0]), body)
            elif (source := self.headers.get("x-goog-copy-source")) is not None:
                self._copy(bucket, key, *unquote(source).lstrip("/").split("/", 1))
            else:
                self._write(bucket, key, body, self._metadata())

    def do_POST(self) -> None:
        """Begin an upload in parts, or make an object of its parts."""
        bucket, key, query = self._place()
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        with self.lock:
            if bucket not in self.buckets:
                self._error(404, "NoSuchBucket")
            elif "uploads" in query:
                upload = f"upload-{next(self.numbers)}"
                self.uploads[upload] = (self._metadata(), {})
                found = f"<Bucket>{bucket}</Bucket><Key>{escape(key)}</Key><UploadId>{upload}</UploadId>"
                self._answer("InitiateMultipartUploadResult", found)
            elif (kept := self.uploads.pop(query["uploadId"][0], None)) is None:
                self._error(404, "NoSuchUpload")
            else:
                numbers = map(int, re.findall(rb"<PartNumber>(\d+)</PartNumber>", body))
                self._write(bucket, key, b"".join(kept[1][number] for number in numbers), kept[0])

    def _metadata(self) -> dict[str, str]:
        return {name.lower(): value for name, value in self.headers.items() if name.lower().startswith("x-goog-meta-")}

    def _keep_part(self, upload: str, number: int, body: bytes) -> None:
        if upload not in self.uploads:
            self._error(404, "NoSuchUpload")
            return
        self.uploads[upload][1][number] = body
        self._send(200, fields={"ETag": _etag(body)})

    def _copy(self, bucket: str, key: str, source_bucket: str, source: str) -> None:
        there = self.buckets.get(source_bucket, {}).get(source)
        if there is None:
            self._error(404, "NoSuchKey")
            return
        self._write(bucket, key, there[1], there[2])

    def _write(self, bucket: str, key: str, value: bytes, metadata: dict[str, str]) -> None:
        there = self.buckets[bucket].get(key)
        wanted = self.headers.get("x-goog-if-generation-match")
        if wanted is not None and int(wanted) != (there[0] if there else 0):
            self._error(412, "PreconditionFailed")
            return
        Service.generation += 1
        self.buckets[bucket][key] = (Service.generation, value, metadata)
        written = f"<Key>{escape(key)}</Key><ETag>{escape(_etag(value))}</ETag>"
        fields = {"ETag": _etag(value), "x-goog-generation": str(Service.generation)}
        self._answer("CompleteMultipartUploadResult", written, fields)

    def _answer(self, kind: str, content: str, fields: dict[str, str] | None = None) -> None:
        self._send(200, f"<?xml version='1.0' encoding='UTF-8'?><{kind}>{content}</{kind}>".encode(), fields)

    def do_GET(self) -> None:
        bucket, key, query = self._place()
        with self.lock:
            objects = self.buckets.get(bucket)
            there = objects.get(key) if objects is not None else None
        if objects is None:
            self._error(404, "NoSuchBucket")
        elif not key:
            self._list(objects, query)
        elif there is None:
            self._error(404, "NoSuchKey")
        else:
            self._value(*there)

    do_HEAD = do_GET

    def do_DELETE(self) -> None:
        bucket, key, query = self._place()
        with self.lock:
            if "uploadId" in query:
                gone: object = self.uploads.pop(query["uploadId"][0], None)
            else:
                gone = self.buckets.get(bucket, {}).pop(key, None)
        self._send(204) if gone else self._error(404, "NoSuchKey")

    def _value(self, generation: int, value: bytes, kept: dict[str, str]) -> None:
        fields = {
            "ETag": _etag(value), "x-goog-generation": str(generation),
            "Last-Modified": "Mon, 16 Nov 2026 17:00:00 GMT",
            "x-goog-hash": f"md5={base64.b64encode(hashlib.md5(value).digest()).decode()}", **kept,
        }  # fmt: skip
        if self.headers.get("If-Match") not in (None, _etag(value)):
            self._error(412, "PreconditionFailed")
            return
        span = self.headers.get("Range")
        if span is None:
            self._send(200, value, {**fields, "Content-Length": str(len(value))})
            return
        first, _, last = span.removeprefix("bytes=").partition("-")
        start, stop = int(first), min(int(last) + 1 if last else len(value), len(value))
        if start >= len(value):
            self._error(416, "InvalidRange")
            return
        part = value[start:stop]
        about = {"Content-Range": f"bytes {start}-{stop - 1}/{len(value)}", "Content-Length": str(len(part))}
        self._send(206, part, {**fields, **about})

    def _list(self, objects: dict[str, tuple[int, bytes, dict[str, str]]], query: dict[str, list[str]]) -> None:
        """A page of at most 1,000 keys; the token is the last key of the page before."""
        prefix, delimiter = query.get("prefix", [""])[0], query.get("delimiter", [""])[0]
        after = query.get("continuation-token", query.get("start-after", [""]))[0]
        entries, folders = [], dict[str, None]()
        with self.lock:
            names = sorted(name for name in objects if name.startswith(prefix) and name > after)
            for name in names[:1000]:
                below, found, _ = name[len(prefix) :].partition(delimiter) if delimiter else (name, "", "")
                if found:
                    folders[prefix + below + delimiter] = None
                else:
                    generation, value, _ = objects[name]
                    entries.append(
                        f"<Contents><Key>{escape(name)}</Key><Generation>{generation}</Generation><Size>{len(value)}</Size>"
                        f"<LastModified>2026-11-16T17:00:00.000Z</LastModified><ETag>{escape(_etag(value))}</ETag></Contents>"
                    )
        more = f"<NextContinuationToken>{escape(names[999])}</NextContinuationToken>" if len(names) > 1000 else ""
        shared = "".join(f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>" for name in folders)
        listed = f"<ListBucketResult>{''.join(entries)}{shared}{more}</ListBucketResult>"
        self._send(200, f"<?xml version='1.0' encoding='UTF-8'?>{listed}".encode())


def _etag(value: bytes) -> str:
    return f'"{hashlib.md5(value).hexdigest()}"'


def main() -> None:
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Service).serve_forever()


if __name__ == "__main__":
    main()
