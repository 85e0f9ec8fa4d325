"""What source files were found to hold when they were hashed, so that the same content at a new time is hashed once.

A source that was copied has other times than its plan. `seen.bin` has 16 bytes for each part of such a file: a hash of
its path, its size, its times, where the part begins and ends, and the digest that it was found to have. Whoever expects
another digest, or finds other times, does not find the hash. With a key it is a tag, which nobody else can make.

The file is advisory: it may be lost, damaged or read-only at any time, which costs hashing again.
"""

import hashlib
from contextlib import suppress
from functools import cached_property

import msgspec

from forebay.errors import ForebayError
from forebay.format import layout
from forebay.format.tensors import hmac_key, tag
from forebay.source import Source, SourceFile
from forebay.store.base import MAX_DOCUMENT_BYTES, Missing, Store, read_document

_ENTRY_BYTES = 16
_MOST_ENTRIES = MAX_DOCUMENT_BYTES // _ENTRY_BYTES


class SeenContent:
    """The record of a cache for one source, read when it is first asked."""

    def __init__(self, store: Store, source: Source) -> None:
        self._store, self._source, self._key = store, source, hmac_key()
        self._added: set[bytes] = set()

    def has(self, file: SourceFile, start: int, stop: int, digest: int) -> bool:
        """Whether a part has a digest; hashes it unless it was found to have that one."""
        entry = self._entry(file, start, stop, digest)
        if entry is not None and (entry in self._added or entry in self._known):
            return True
        same = self._source.digest(file, start, stop) == digest
        if same and entry is not None:
            self._added.add(entry)
        return same

    def keep(self) -> None:
        """Write what was added; a cache that cannot be written to is left as it is."""
        if not self._added:
            return
        entries = self._known | self._added if len(self._known | self._added) <= _MOST_ENTRIES else self._added
        with suppress(OSError, ForebayError):
            self._store.replace(layout.SEEN, [b"".join(sorted(entries))], durable=False)

    @cached_property
    def _known(self) -> frozenset[bytes]:
        try:
            content = read_document(self._store, layout.SEEN)
        except (Missing, OSError, ForebayError):
            return frozenset()
        whole = len(content) - len(content) % _ENTRY_BYTES
        return frozenset(content[at : at + _ENTRY_BYTES] for at in range(0, whole, _ENTRY_BYTES))

    def _entry(self, file: SourceFile, start: int, stop: int, digest: int) -> bytes | None:
        """None where a change of the file might not show."""
        if not file.ctime_ns and not file.etag:
            return None
        described = self._source.describe()
        place = (described.get("kind"), described.get("root"), *msgspec.structs.astuple(file), start, stop)
        text = repr((*place, self._source.stamp(file), digest)).encode()  # a path may be no UTF-8
        whole = hashlib.sha256(text).digest() if self._key is None else tag(self._key, [text])
        return whole[:_ENTRY_BYTES]
