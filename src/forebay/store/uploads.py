"""What is sent to a bucket, and how.

    small ──▶ one request, on condition that its key is new
    large ──▶ parts, into an object aside with a name of this process ──▶ copied to its key on the same condition

A part that breaks off is sent again, not all of a chunk. Whoever is killed in between leaves an object aside, which no
listing shows and `clean` removes.
"""

import hashlib
import secrets
from collections.abc import Iterator, Sequence
from functools import cached_property

from forebay.errors import StoreRefused
from forebay.store.base import Buffer

WRITER, SHA256 = "forebaywriter", "forebaysha256"  # names of metadata that every service allows
ASIDE = ".uploads/"
MOST_BYTES = 5 << 30  # of one object, written or copied by one request: the limit of S3
SMALL_BYTES = 8 << 20  # of an upload that has to end in a minute; one that is n times as large has n minutes
PARTS_FROM_BYTES = 64 << 20  # most chunks are smaller, and parts and a copy cost four to seven requests more
PART_BYTES = 16 << 20  # S3 allows 10,000 parts of at least 5 MiB
PARTS_AT_ONCE = 4


class Upload:
    """Bytes to be put, with the name of this write: one for all of its attempts."""

    def __init__(self, address: str, key: str, data: Sequence[Buffer]) -> None:
        self.key, self._data = key, data
        self.size, self.writer = sum(memoryview(each).nbytes for each in data), secrets.token_hex(12)
        if self.size > MOST_BYTES:
            problem = f"'{key}' has {self.size:,} bytes, and one object has at most {MOST_BYTES:,}"
            raise StoreRefused(address, problem, "choose smaller chunks (`chunk_bytes` of the recipe)")
        digest = hashlib.sha256()
        for each in data:
            digest.update(each)
        self.sha256 = digest.digest()
        self.attributes = {WRITER: self.writer, SHA256: self.sha256.hex()}

    @cached_property
    def body(self) -> bytes:
        return b"".join(self._data)

    def pieces(self) -> Iterator[memoryview]:
        """The body in slices that are not copies: a large chunk is in memory once."""
        for each in filter(len, self._data):
            view = memoryview(each).cast("B")
            yield from (view[start : start + PART_BYTES] for start in range(0, len(view), PART_BYTES))


def upload_minutes(size: int) -> int:
    """How long an upload may take: a power of two, so that few clients are needed, and at least 140 kB/s are sent.

    >>> [upload_minutes(size) for size in (0, SMALL_BYTES, SMALL_BYTES + 1, 1 << 30)]
    [1, 1, 2, 128]
    """
    return 1 << max(0, (size - 1) // SMALL_BYTES).bit_length()
