"""What planning has found so far, kept beside the plan: a planning that was killed continues where it was.

planning/<hash of what was asked>.bin      the answer, and the hash of it

The question names a file with its size and times, so an answer is used only while the file is the same. A planner
removes those that it asked for once the plan is written, or if it cannot be made; others may still plan.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import xxhash

from forebay.errors import ForebayError
from forebay.format import layout
from forebay.format.tensors import hmac_key
from forebay.recipe import canonical_json
from forebay.source import SourceFile
from forebay.store.base import Missing, Store, is_full

MOST_BYTES = 1 << 30  # of an answer: more is not one of ours
_SUM_BYTES = 8


class KeptResults:
    """Answers by question; that one cannot be kept, or is damaged, only means that the work is done again."""

    def __init__(self, store: Store) -> None:
        self._store, self._root = store, store.local_path("")
        self._is_new = self._root is not None and not os.path.exists(self._root)
        self._asked: set[str] = set()
        self.is_used = hmac_key() is None  # with a key, a plan is signed: nothing that is not signed may shape it

    def find(self, *question: Any) -> bytes | None:
        if not self.is_used:
            return None
        try:
            content = self._store.read(self._key(question), 0, MOST_BYTES + 1)
        except (Missing, OSError, ForebayError):
            return None
        answer, found = content[:-_SUM_BYTES], content[-_SUM_BYTES:]
        return answer if len(content) <= MOST_BYTES and found == _sum(answer) else None

    def keep(self, answer: bytes, *question: Any) -> None:
        if not self.is_used:
            return
        with suppress(OSError, ForebayError):
            self._store.replace(self._key(question), [answer, _sum(answer)], durable=False)

    def remove(self) -> None:
        """Remove the answers that were asked for, and the folders that were made for them."""
        with suppress(OSError, ForebayError):
            for key in self._asked & {entry.key for entry in self._store.entries(layout.PLANNING)}:
                self._store.delete(key)
        if self._root is not None:
            with suppress(OSError):
                os.rmdir(os.path.join(self._root, layout.PLANNING))
                if self._is_new:
                    os.rmdir(self._root)

    def _key(self, question: tuple[Any, ...]) -> str:
        key = layout.planning(xxhash.xxh3_128_hexdigest(canonical_json(list(question))))
        self._asked.add(key)
        return key


@contextmanager
def keeping_results(store: Store) -> Iterator[KeptResults]:
    """Results that are kept if planning is interrupted, and removed otherwise: also from a full disk, to make room."""
    kept = KeptResults(store)
    try:
        yield kept
    except (ForebayError, OSError) as error:
        if isinstance(error, ForebayError) or is_full(error):
            kept.remove()
        raise
    kept.remove()


def identity_facts(file: SourceFile) -> list[Any]:
    """What a question says of a file: with other content, it is another question."""
    return [file.path, file.size, file.mtime_ns, file.ctime_ns, file.inode, file.etag]


def _sum(answer: bytes) -> bytes:
    value: bytes = xxhash.xxh3_64_digest(answer)
    return value
