"""Find where the samples of compressed files end, several files at a time, and keep it until all is planned."""

import os
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import islice
from queue import SimpleQueue

import msgspec
import numpy as np

from forebay.building.kept_results import KeptResults, identity_facts
from forebay.columns import Array
from forebay.source import Source, SourceFile

AHEAD = 2  # streams that are scanned, for each thread
MOST_THREADS = 8
_HEAD = np.dtype("<u8")


@dataclass(frozen=True, slots=True)
class StreamScan:
    """What one pass over a compressed file found: the file with its digest, and where its samples end."""

    file: SourceFile
    ends: Array  # uint64, rising

    def cuts(self, first: int, every: int) -> Iterator[int]:
        """What `Source.cuts` finds from the beginning of the file."""
        cut, step, end = 0, first, int(self.ends[-1]) if len(self.ends) else 0
        while cut + step < end:
            found = int(self.ends[np.searchsorted(self.ends, cut + step)])
            if found >= end:
                break
            yield (cut := found)
            step = every
        if end:
            yield end

    def encode(self) -> bytes:
        known = (int(self.file.digest is not None), self.file.digest or 0)
        return np.array(known, _HEAD).tobytes() + self.ends.astype(_HEAD).tobytes()

    @classmethod
    def decode(cls, file: SourceFile, answer: bytes) -> "StreamScan | None":
        if len(answer) < 2 * _HEAD.itemsize or len(answer) % _HEAD.itemsize:
            return None
        known, digest, *_ = (values := np.frombuffer(answer, _HEAD))[:2].tolist()
        ends = values[2:].astype(np.uint64)
        is_sound = bool((ends[1:] > ends[:-1]).all()) and (not len(ends) or bool(0 < ends[0] <= ends[-1] < 1 << 62))
        return cls(msgspec.structs.replace(file, digest=digest if known else None), ends) if is_sound else None


class StreamScans:
    """Scans compressed files in threads, a few ahead of where they are asked for: most of the time is decompression.

    One file alone is left to `Source.cuts`, which shows how far it is. At the end nobody waits for the threads, which
    are daemons: a scan cannot be stopped, and of a large file it takes minutes.
    """

    def __init__(
        self, source: Source, files: Sequence[SourceFile], starts: Mapping[str, int], kept: KeptResults | None
    ) -> None:
        self._source, self._starts, self._kept = source, starts, kept
        threads = min(MOST_THREADS, os.cpu_count() or 1)
        self._left = (file for file in files if self._is_scanned(file)) if _has_two_streams(files) else iter(())
        self._ahead: deque[tuple[str, Future[StreamScan | None]]] = deque()
        self._work: SimpleQueue[tuple[SourceFile, Future[StreamScan | None]] | None] = SimpleQueue()
        self._keeping, self._is_closed = threading.Lock(), False
        for file in islice(self._left, AHEAD * threads):
            self._submit(file)
        self._threads = min(threads, len(self._ahead))
        for _ in range(self._threads):
            threading.Thread(target=self._run, name="forebay-scan", daemon=True).start()

    def take(self, file: SourceFile) -> StreamScan | None:
        """What was found of the next file; None where it is not scanned, or cannot be held."""
        if not self._ahead or self._ahead[0][0] != file.path:
            return None
        _, future = self._ahead.popleft()
        for following in islice(self._left, 1):
            self._submit(following)
        return future.result()

    def close(self) -> None:
        with self._keeping:  # from now on nobody would remove what is kept
            self._is_closed = True
        for _ in range(self._threads):
            self._work.put(None)

    def _is_scanned(self, file: SourceFile) -> bool:
        return file.stream and not self._starts.get(file.path)

    def _submit(self, file: SourceFile) -> None:
        future: Future[StreamScan | None] = Future()
        self._ahead.append((file.path, future))
        self._work.put((file, future))

    def _run(self) -> None:
        while (given := self._work.get()) is not None and not self._is_closed:
            file, future = given
            try:
                future.set_result(self._scan(file))
            except BaseException as error:  # raised where it is asked for
                future.set_exception(error)

    def _scan(self, file: SourceFile) -> StreamScan | None:
        question = ("sample ends", dict(self._source.describe()), identity_facts(file))
        answer = self._kept.find(*question) if self._kept else None
        known = StreamScan.decode(file, answer) if answer is not None else None
        if known is not None:
            return known
        ends = self._source.sample_ends(file)
        if ends is None:
            return None
        scan = StreamScan(self._source.scanned(file), ends)
        if not self._source.look(file.path).same_identity(file):
            return None  # it changes: `_cut_unchanged` waits for it
        with self._keeping:
            if self._kept and not self._is_closed:
                self._kept.keep(scan.encode(), *question)
        return scan


def _has_two_streams(files: Sequence[SourceFile]) -> bool:
    return sum(1 for _ in islice((file for file in files if file.stream), 2)) == 2
