"""Bytes on their way to and from a bucket."""

import hashlib
import secrets
import tempfile
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from forebay.errors import StoreFull, StoreRefused
from forebay.store.base import IN_MEMORY_BYTES, Buffer, is_full
from forebay.store.file_map import map_file

WRITER, SHA256 = "forebaywriter", "forebaysha256"  # names of metadata that every service allows
MOST_BYTES = 5 << 30  # of one object, written by one request: the limit of S3
SMALL_BYTES = 8 << 20  # of an upload that has to end in a minute; one that is n times as large has n minutes


class Upload:
    """Bytes to be put, with the name of this write: one for all of its attempts."""

    def __init__(self, address: str, key: str, data: Sequence[Buffer]) -> None:
        self.key, self._data = key, data
        self.size, self.writer = sum(memoryview(each).nbytes for each in data), secrets.token_hex(12)
        if self.size > MOST_BYTES:
            problem = f"'{key}' has {self.size:,} bytes, and one object has at most {MOST_BYTES:,}"
            raise StoreRefused(
                f"'{address}' cannot be used as a store: {problem}",
                hint="choose smaller chunks (`chunk_bytes` of the recipe)",
            )
        digest = hashlib.sha256()
        for each in data:
            digest.update(each)
        self.attributes = {WRITER: self.writer, SHA256: digest.hexdigest()}

    @cached_property
    def body(self) -> bytes:
        return b"".join(self._data)


def upload_minutes(size: int) -> int:
    """How long an upload may take: a power of two, so that few clients are needed, and at least 140 kB/s are sent.

    >>> [upload_minutes(size) for size in (0, SMALL_BYTES, SMALL_BYTES + 1, 1 << 30)]
    [1, 1, 2, 128]
    """
    return 1 << max(0, (size - 1) // SMALL_BYTES).bit_length()


class Download:
    """The bytes of a response as they arrive: in memory, or in a file without a name when there are many."""

    def __init__(self, key: str) -> None:
        self._key, self._size = key, 0
        self._bytes = tempfile.SpooledTemporaryFile(IN_MEMORY_BYTES, prefix="forebay-")  # noqa: SIM115, see __del__

    def __len__(self) -> int:
        return self._size

    def add(self, piece: Any) -> None:
        try:
            self._bytes.write(piece)
            self._bytes.flush()
        except OSError as error:
            if not is_full(error):
                raise
            problem = "the folder of temporary files is full; set TMPDIR to another, or read through a tier"
            raise StoreFull(
                f"'{tempfile.gettempdir()}' has no space for '{self._key}': {problem}",
                hint="free some space and try again",
            ) from error
        self._size += len(piece)

    def __del__(self) -> None:
        self._bytes.close()

    def cut(self, size: int) -> None:
        """Truncate to a size."""
        if self._size > size:
            self._bytes.truncate(size)
            self._size = size

    def view(self) -> memoryview:
        if self._size > IN_MEMORY_BYTES:
            return map_file(self._bytes.fileno())
        self._bytes.seek(0)
        return memoryview(self._bytes.read(self._size))
