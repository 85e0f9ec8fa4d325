"""Recipes that do as their samples say, and notes of which process made what.

A sample is a line of 200 bytes that begins with an order:

    keep                 it becomes a row, nothing else
    die SIGKILL 2        the process that makes it gets this signal, the first two times
    raise OSError 2      the recipe raises this, the first two times
    append PATH 1        a line is appended to a file, once
    truncate PATH 1      a file loses its second half, once
    rewrite PATH 1       a file gets lines of another length, as many bytes as it had, and its old time, once
    stop PATH 1          it touches a file, then does not return
    await PATH 1         it waits until a file is there, once
    fail                 it becomes a failure, not a row

Orders are followed only where a chunk is made: planning tries a recipe on a few samples in the builder itself. What
must be counted across processes is kept in the folder that FOREBAY_TEST_NOTES names, never in a field: fields are part
of the bytes.
"""

import os
import signal
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import ClassVar

import msgspec
import numpy as np

from forebay.columns import Codec, Column, Columns, Ragged
from forebay.format import layout
from forebay.recipe import ChunkTarget, RecipeHooks, Rows
from forebay.source import Failure, Sample
from forebay.store import LocalStore
from forebay.store.base import Buffer

LINE_BYTES = 200
NOTES = "FOREBAY_TEST_NOTES"


class ObedientRecipe(RecipeHooks, msgspec.Struct, frozen=True, kw_only=True):
    """Keep every line, do what it says, take `seconds` for a chunk of `rows` lines."""

    kind: ClassVar[str] = "obedient"
    revision: ClassVar[int] = 1
    sample_ids: ClassVar[str] = "id"

    rows: int = 2
    seconds: float = 0.0
    codec: Codec = "lz4"

    def columns(self) -> tuple[Column, ...]:
        return (
            Column(name="data", dtype="uint8", ragged=True, codec=self.codec),
            Column(name="id", dtype="uint8", ragged=True),
        )

    def chunk_target(self) -> ChunkTarget:
        return ChunkTarget(rows=self.rows)

    def make(self, samples: Iterable[Sample]) -> Rows:
        taken = list(samples)
        if not samples.is_preview and taken:
            _write_note("makes", f"{os.getpid()} {taken[0].id}\n")
            _wait_for_permission(taken[0])
            time.sleep(self.seconds)
            for sample in taken:
                _follow(sample)
        failures = tuple(Failure(sample.id, "told") for sample in taken if bytes(sample.data).startswith(b"fail "))
        taken = [sample for sample in taken if not bytes(sample.data).startswith(b"fail ")]
        data = Ragged.of_bytes([sample.data for sample in taken])
        ids = Ragged.of_bytes([sample.id.encode() for sample in taken])
        return Rows({"data": data, "id": ids}, failures, statistics={"bytes": int(data.values.nbytes)})


class LengthLayer(RecipeHooks, msgspec.Struct, frozen=True, kw_only=True):
    """A layer over `data`: the length of every row, for rows whose number in the chunk is a multiple of `every`."""

    kind: ClassVar[str] = "lengths"
    revision: ClassVar[int] = 1
    reads: ClassVar[tuple[str, ...]] = ("data",)

    every: int = 2

    def columns(self) -> tuple[Column, ...]:
        return (Column(name="length", dtype="int32"),)

    def make(self, rows: Columns) -> Rows:
        data = rows["data"]
        assert isinstance(data, Ragged)
        length = np.diff(data.offsets.astype(np.int64)).astype(np.int32)
        present = np.arange(len(data)) % self.every == 0
        failures = tuple(Failure(str(row), "odd") for row in np.flatnonzero(~present))
        return Rows({"length": np.where(present, length, 0)}, failures, present=present)


def write_orders(path: Path, orders: Sequence[str]) -> Path:
    """A source file with one line of 200 bytes per order."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(order_line(number, order) for number, order in enumerate(orders)))
    return path


def order_line(number: int, order: str) -> bytes:
    line = f"{order} #{number}".ljust(LINE_BYTES - 1).encode() + b"\n"
    assert len(line) == LINE_BYTES
    return line


def orders(chunks: int, rows: int = 2, **by_chunk: str) -> list[str]:
    """Lines for so many chunks; `c3="die SIGKILL 1"` gives the last line of chunk 3 that order."""
    lines = ["keep"] * (chunks * rows)
    for name, order in by_chunk.items():
        lines[int(name[1:]) * rows + rows - 1] = order
    return lines


def makes(notes: Path, rows: int = 2) -> list[tuple[int, int]]:
    """(pid, chunk) of every time a chunk was begun, in order; for a source of one file."""
    text = (notes / "makes").read_text() if (notes / "makes").exists() else ""
    pairs = [line.split() for line in text.splitlines()]
    return [(int(pid), int(sample.rpartition("@")[2]) // (rows * LINE_BYTES)) for pid, sample in pairs]


def let_begin(notes: Path, chunks: int | None) -> None:
    """Let only so many different chunks be made: whoever begins another waits. None lets all be made."""
    if chunks is None:
        (notes / "allowed").unlink()
    else:
        (notes / "allowed").write_text(str(chunks))


def _wait_for_permission(sample: Sample) -> None:
    notes = Path(os.environ.get(NOTES, "/nowhere"))
    if not (notes / "allowed").exists():
        return
    lines = (notes / "makes").read_text().splitlines()
    begun = list(dict.fromkeys(line.partition(" ")[2] for line in lines))
    while (notes / "allowed").exists() and begun.index(sample.id) >= int((notes / "allowed").read_text()):
        time.sleep(0.01)


def _follow(sample: Sample) -> None:
    match bytes(sample.data).decode().split():
        case ["die", name, times, _] if _is_due(sample, times):
            os.kill(os.getpid(), signal.Signals[name])
        case ["raise", name, times, _] if _is_due(sample, times):
            raise {"OSError": OSError, "ValueError": ValueError}[name](f"as line {sample.id} says")
        case ["append", path, times, _] if _is_due(sample, times):
            with open(path, "ab") as file:
                file.write(b"more\n")
        case ["truncate", path, times, _] if _is_due(sample, times):
            os.truncate(path, os.path.getsize(path) // 2)
        case ["rewrite", path, times, _] if _is_due(sample, times):
            rewrite(Path(path))
        case ["stop", path, times, _] if _is_due(sample, times):
            Path(path).touch()
            time.sleep(600)
        case ["await", path, times, _] if _is_due(sample, times):
            deadline = time.monotonic() + 600
            while not os.path.exists(path) and time.monotonic() < deadline:
                time.sleep(0.01)


def rewrite(path: Path) -> None:
    """Lines of 150 bytes, the same size and time."""
    status = path.stat()
    path.write_bytes((b"keep".ljust(149) + b"\n") * (status.st_size // 150) + b"\n" * (status.st_size % 150))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def _is_due(sample: Sample, times: str) -> bool:
    name = f"obeyed-{sample.id.replace('/', '_')}"
    _write_note(name, "x")
    return (Path(os.environ[NOTES]) / name).stat().st_size <= int(times)


def _write_note(name: str, text: str) -> None:
    """Append in one write, so that notes of many processes do not mix."""
    folder = os.environ.get(NOTES)
    if folder is None:
        return
    descriptor = os.open(os.path.join(folder, name), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


class TogetherStore(LocalStore):
    """Creates a key when everybody is about to: all have looked before, and nobody has seen it."""

    def __init__(self, path: Path, key: str, barrier) -> None:
        super().__init__(path)
        self._key, self._barrier = key, barrier

    def create(self, key: str, data: Sequence[Buffer], **options) -> bool:
        if key == self._key:
            self._barrier.wait(600)
        return super().create(key, data, **options)


class HesitantStore(LocalStore):
    """Writes a chunk only once the next one is being made, for each of three tries anew; the last one at once.

    The chunk before a deadly one, which kills whoever makes it three times, is not written by a process that dies of
    it: however slow or fast the machine is, that chunk is lost each time.
    """

    def __init__(self, path: Path, chunks: int, deadly: int | None = None) -> None:
        super().__init__(path)
        self.chunks, self.deadly = chunks, deadly

    def document(self):
        return {**super().document(), "arguments": [str(self.address), self.chunks, self.deadly]}

    def create(self, key: str, data: Sequence[Buffer], **options) -> bool:
        parsed = layout.parse_chunk(key)
        if key.startswith(layout.LAYERS) and parsed is not None and parsed[1] + 1 < self.chunks:
            self._wait_for(parsed[1] + 1)
        return super().create(key, data, **options)

    def _wait_for(self, chunk: int) -> None:
        for _ in range(1000):
            noted = makes(Path(os.environ[NOTES]))
            begun = [number for _, number in noted]
            if chunk == self.deadly:
                if begun.count(chunk) >= 3 and (os.getpid(), chunk) not in noted:
                    return
            elif begun.count(chunk) >= min(3, begun.count(chunk - 1)):
                return
            time.sleep(0.02)
        raise ValueError(f"chunk {chunk} was not begun while the one before it was written")
