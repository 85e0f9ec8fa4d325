# mypy: ignore-errors
"""Recipes, sources and small caches for the tests of reading, layers, verifying, repairing and growing.

Importable, so that worker processes find them.
"""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
from tests.helpers.cache_files import segment_of

import forebay as fb
from forebay.building.layers import bind_layer
from forebay.cache.catalog import begin_cache
from forebay.cache.claims import Claims
from forebay.cache.plan import Plan
from forebay.cache.publish import Publication, Publisher
from forebay.columns import Array, Column, Columns, Ragged
from forebay.format import layout
from forebay.format.chunk import encode_chunk
from forebay.format.generation import Generation
from forebay.recipe import ChunkTarget, Rows, fingerprint
from forebay.source import Failure, Part, Sample, SourceFile
from forebay.store import Store

MOOD = {"add": 0}  # what `MoodyRecipe` depends on without saying so


class LineRecipe(fb.RecipeHooks, msgspec.Struct, frozen=True, kw_only=True):
    """Lines that hold a number become rows; a line that holds none is a failure."""

    kind: ClassVar[str] = "numbers"
    revision: ClassVar[int] = 1
    sample_ids: ClassVar[str] = "text"

    chunk_rows: int = 4
    codec: str = "zstd"
    scale: float = 0.5

    def columns(self) -> tuple[Column, ...]:
        return (
            Column(name="number", dtype="int64", rows_per_block=2),
            Column(name="vector", dtype="float32", shape=(2,), codec=self.codec, rows_per_block=2),
            Column(name="text", dtype="uint8", ragged=True, codec="lz4", rows_per_block=2),
        )

    def chunk_target(self) -> ChunkTarget:
        return ChunkTarget(rows=self.chunk_rows)

    def constants(self) -> dict[str, Array]:
        return {"scale": np.array([self.scale], np.float32)}

    def make(self, samples: Iterable[Sample]) -> Rows:
        lines = list(samples)
        good = [line for line in lines if line.data.strip().isdigit()]
        failures = tuple(
            Failure(line.id, "no-number", "not a number") for line in lines if not line.data.strip().isdigit()
        )
        numbers = np.array([int(line.data) for line in good], np.int64)
        return Rows(
            {
                "number": numbers,
                "vector": np.stack([numbers, numbers * self.scale], axis=1).astype(np.float32),
                "text": Ragged.of_bytes([bytes(line.data) for line in good]),
            },
            failures,
            {"sum": int(numbers.sum())},
        )


class MoodyRecipe(LineRecipe, frozen=True, kw_only=True):
    """Rows that depend on something which is no field of the recipe."""

    kind: ClassVar[str] = "moody"

    def make(self, samples: Iterable[Sample]) -> Rows:
        rows = LineRecipe.make(self, samples)
        return with_columns(rows, number=rows.columns["number"] + MOOD["add"])


class LengthLayer(fb.RecipeHooks, msgspec.Struct, frozen=True, kw_only=True):
    """What a further layer adds to numbers: the length of the text, and twice the number; nothing for 3, 7, 11, …"""

    kind: ClassVar[str] = "length"
    revision: ClassVar[int] = 1
    reads: ClassVar[tuple[str, ...]] = ("text", "number")

    times: int = 2

    def columns(self) -> tuple[Column, ...]:
        return (
            Column(name="length", dtype="int32", rows_per_block=3),
            Column(name="times", dtype="int64", codec="zstd", rows_per_block=2),
        )

    def constants(self) -> dict[str, Array]:
        return {"factor": np.array([self.times], np.int16)}

    def make(self, rows: Columns) -> Rows:
        numbers, text = rows["number"], rows["text"]
        assert isinstance(text, Ragged)
        present = numbers % 4 != 3
        length = np.where(present, text.lengths, 0).astype(np.int32)
        failures = tuple(Failure(str(number), "three") for number in numbers[~present].tolist())
        return Rows({"length": length, "times": numbers * self.times * present}, failures, {}, present)


class MoodyLayer(LengthLayer, frozen=True, kw_only=True):
    """A layer that fails where `MOOD` says so."""

    kind: ClassVar[str] = "moody-layer"

    def make(self, rows: Columns) -> Rows:
        if MOOD["add"] in rows["number"].tolist():
            raise ValueError("in no mood")
        return LengthLayer.make(self, rows)


class ShortLayer(LengthLayer, frozen=True, kw_only=True):
    """A layer that loses a row."""

    kind: ClassVar[str] = "short"

    def make(self, rows: Columns) -> Rows:
        made = LengthLayer.make(self, rows)
        assert made.present is not None
        return Rows({name: values[1:] for name, values in made.columns.items()}, present=made.present[1:])


class AdditionLayer(fb.RecipeHooks, msgspec.Struct, frozen=True, kw_only=True):
    """A layer with a column of a chosen name, from base columns of chosen names."""

    kind: ClassVar[str] = "addition"
    revision: ClassVar[int] = 1

    name: str
    reads: tuple[str, ...] = ("number",)
    add: int = 1

    def columns(self) -> tuple[Column, ...]:
        return (Column(name=self.name, dtype="int64"),)

    def make(self, rows: Columns) -> Rows:
        return Rows({self.name: sum(rows[name] for name in self.reads) + self.add})


class LongingLayer(AdditionLayer, frozen=True, kw_only=True):
    """A layer that reads a column which the base layer has not."""

    kind: ClassVar[str] = "longing"
    reads: tuple[str, ...] = ("number", "weight")


class StoredRecipe(fb.RecipeHooks, msgspec.Struct, frozen=True, kw_only=True):
    """Stands for rows that a test stored itself."""

    kind: ClassVar[str] = "stored"
    revision: ClassVar[int] = 1

    declared: tuple[Column, ...]

    def columns(self) -> tuple[Column, ...]:
        return self.declared

    def chunk_target(self) -> ChunkTarget:
        return ChunkTarget(rows=1)

    def make(self, samples: Iterable[Sample]) -> Rows:
        raise NotImplementedError


def with_columns(rows: Rows, **columns: Array | Ragged) -> Rows:
    return Rows({**rows.columns, **columns}, rows.failures, rows.statistics, rows.present)


def write_lines(path: Path, first: int, count: int) -> Path:
    """A file of lines `000017`, all of one length."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(b"%06d\n" % number for number in range(first, first + count)))
    return path


def number_cache(folder: Path, rows: int = 20, **fields: Any) -> Path:
    """A cache of the numbers from 0 on, four to a chunk, and its source, below a folder."""
    write_lines(folder / "raw" / "a.txt", 0, rows // 2)
    write_lines(folder / "raw" / "b.txt", rows // 2, rows - rows // 2)
    fb.build(folder / "cache", fb.sources.lines(folder / "raw"), LineRecipe(**fields), workers=0)
    return folder / "cache"


def layered_cache(folder: Path, rows: int = 20) -> Path:
    """The same with the layer `length` on top."""
    root = number_cache(folder, rows)
    fb.build(root, None, LengthLayer(), workers=0, max_failures=1.0)  # every fourth row is absent
    return root


def stored_cache(store: Store, declared: Sequence[Column], chunks: Sequence[Columns]) -> Generation:
    """A cache of just these rows, chunk by chunk, without a source."""
    recipe = StoredRecipe(declared=tuple(declared))
    begin_cache(store, "stored")
    bound = bind_layer(store, recipe, "stored")
    parts = [[Part(SourceFile(f"{number}.txt", 1), 0, 1)] for number in range(len(chunks))]
    segment = segment_of(parts, number=0, first_chunk=0, source={"kind": "none"}, weight=1)
    store.create(layout.plan_segment(0), segment.encode())
    records = []
    for number, columns in enumerate(chunks):
        encoded = encode_chunk(
            columns, declared, layer="stored", chunk=number, fingerprint=fingerprint(recipe), samples=1
        )
        _write(store, layout.chunk(layout.document_folder(bound), number), b"".join(encoded.buffers))
        records.append(encoded.record(encoded.sha256()))
    about = Publication(layer="stored", fingerprint=bound.fingerprint, plan=Plan([segment]), versions={})
    publisher = Publisher(store, Claims(store), about, None)
    for record in records:
        publisher.add(record)
    generation = publisher.publish()
    assert generation is not None
    return generation


def flip(path: Path, position: int, mask: int = 0x10) -> None:
    """Change one byte of a file in place, under every map of it."""
    with open(path, "r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ mask]))


def tree(root: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    found = (path for path in sorted(root.rglob("*")) if path.is_file())
    return {str(path.relative_to(root)): path.read_bytes() for path in found}


def identities(root: Path) -> dict[str, tuple[int, int]]:
    """Inode and time of every file below a folder."""
    found = {str(path.relative_to(root)): path.stat() for path in sorted(root.rglob("*")) if path.is_file()}
    return {name: (status.st_ino, status.st_mtime_ns) for name, status in found.items()}


def _write(store: Store, key: str, value: bytes) -> None:
    """Without a sync, where the store is a folder: tests write thousands."""
    if isinstance(store, fb.LocalStore):
        path = Path(os.path.abspath(store.address), key)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(value)
    else:
        store.create(key, [value])


class SumLayer(fb.RecipeHooks, msgspec.Struct, frozen=True, kw_only=True):
    """A layer made of a base column and of one of the layer `length`; it says nothing of presence itself."""

    kind: ClassVar[str] = "sum"
    revision: ClassVar[int] = 1
    reads: ClassVar[tuple[str, ...]] = ("number", "times")

    def columns(self) -> tuple[Column, ...]:
        return (Column(name="sum", dtype="int64"), Column(name="seen", dtype="bool"))

    def make(self, rows: Columns) -> Rows:
        bits = next(values for name, values in rows.items() if name.endswith(".present"))
        return Rows({"sum": rows["number"] + rows["times"], "seen": np.asarray(bits)})
