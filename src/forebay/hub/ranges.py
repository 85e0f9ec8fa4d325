"""Pieces of a file of the hub, without the whole: for footers, and for a glance at some rows.

A piece cannot be held against the hash of the whole; nothing that is kept may be made from it.
"""

import io
import re

import httpx2

from forebay.errors import DownloadCorrupt
from forebay.hub.asking import ask
from forebay.hub.listing import RemoteFile
from forebay.hub.patience import Passing, patiently
from forebay.hub.repository import Repository

_CONTENT_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+|\*)")


def read_range(repository: Repository, commit: str, file: RemoteFile, start: int, stop: int) -> bytes:
    """The bytes from `start` to `stop`; a read that breaks off goes on where it broke."""
    stop = min(stop, file.size)
    what = f"'{file.path}' of {repository.what}"
    url = repository.url(commit, file.path)
    body = bytearray()

    def attempt() -> bytes:
        begin = start + len(body)
        headers = {"range": f"bytes={begin}-{stop - 1}"}
        with ask(url, repository.patience, repository.address, what, headers) as response:
            known = begin - _begins_at(response, begin, file, what)
            for piece in response.iter_raw():
                body.extend(piece[known : known + stop - start - len(body)])
                known = max(0, known - len(piece))
                if len(body) == stop - start:  # a server that knows no ranges would go on
                    break
        if len(body) < stop - start:
            raise Passing(f"it ended after {len(body):,} of {stop - start:,} bytes")
        return bytes(body)

    return patiently(attempt, repository.patience, repository.address, what, lambda: len(body)) if stop > start else b""


def _begins_at(response: httpx2.Response, begin: int, file: RemoteFile, what: str) -> int:
    if response.status_code == 200:
        return 0
    found = _CONTENT_RANGE.fullmatch(response.headers.get("content-range", ""))
    if found is None or int(found[1]) != begin or found[2] not in ("*", str(file.size)):
        problem = f"HTTP {response.status_code} does not give byte {begin:,} of {file.size:,}"
        raise Passing(problem, final=DownloadCorrupt(what, problem))
    return begin


class RangeFile(io.RawIOBase):
    """A file of the hub to seek and read in, each read a request of its own."""

    def __init__(self, repository: Repository, commit: str, file: RemoteFile) -> None:
        self._repository, self._commit, self._file = repository, commit, file
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._file.size}[whence]
        self._position = base + offset
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        stop = self._file.size if size is None or size < 0 else self._position + size
        piece = read_range(self._repository, self._commit, self._file, self._position, stop)
        self._position += len(piece)
        return piece
