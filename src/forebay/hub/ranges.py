"""Pieces of a file of the hub, without the whole: for footers, and for a glance at some rows.

A piece cannot be held against the hash of the whole; nothing that is kept may be made from it.
"""

import io

from forebay.errors import DownloadCorrupt, HubNotFound
from forebay.hub.content_range import begins_at
from forebay.hub.hub_file import HubFile
from forebay.hub.patience import Passing

_LARGEST_RANGE = 512 << 20  # bytes; a footer says how long it is, and a row group how long its columns are


def read_range(file: HubFile, start: int, stop: int) -> bytes:
    """The bytes from `start` to `stop`; a read that breaks off goes on where it broke."""
    stop = min(stop, file.size)
    if stop - start > _LARGEST_RANGE:
        problem = f"its footer or a column of a row group takes {stop - start:,} bytes, more than is read at once"
        raise HubNotFound(file.what, problem, "download the file and build from it")
    body = bytearray()

    def attempt() -> bytes:
        begin = start + len(body)
        with file.ask({"range": f"bytes={begin}-{stop - 1}"}) as response:
            found = begins_at(response, begin, file.size)
            if found is None:
                problem = f"HTTP {response.status_code} does not give byte {begin:,} of {file.size:,}"
                raise Passing(problem, final=DownloadCorrupt(file.what, problem))
            known = begin - found
            for piece in response.iter_raw():
                body.extend(piece[known : known + stop - start - len(body)])
                known = max(0, known - len(piece))
                if len(body) == stop - start:  # a server that knows no ranges would go on
                    break
        if len(body) < stop - start:
            raise Passing(f"it ended after {len(body):,} of {stop - start:,} bytes")
        return bytes(body)

    return file.patiently(attempt, lambda: len(body)) if stop > start else b""


class RangeFile(io.RawIOBase):
    """A file of the hub to seek and read in, each read a request of its own."""

    def __init__(self, file: HubFile) -> None:
        self._file = file
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
        piece = read_range(self._file, self._position, stop)
        self._position += len(piece)
        return piece
