"""Damage, byte by byte: whatever byte of a cache changes, nothing wrong is ever read, and `verify` finds it.

Every chunk is damaged at the same position at once, and each is then judged by itself.
"""

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
from tests.helpers.byte_positions import STRIDES, struck
from tests.helpers.layer_recipes import LengthLayer, LineRecipe

import forebay as fb
from forebay.cache.reports import VerifyReport
from forebay.columns import Ragged
from forebay.errors import Damaged, ForebayError, IndexCorrupt
from forebay.format import layout
from forebay.format.chunk_file import ChunkFile
from forebay.source import Part, PartDigest, Sample, Source, SourceFile

LINES = [b"0", b"11", b"", b"3", b"444", b"5", b"66666", b"7", b"8"]  # the empty one fails


class ListSource(Source):
    """Lines that a test wrote down: three to a file."""

    unit = "bytes"

    def describe(self) -> dict[str, Any]:
        return {"kind": "lines", "root": "/nowhere", "patterns": ["*"]}

    def files(self) -> list[SourceFile]:
        return [SourceFile(str(number), 3) for number in range(len(LINES) // 3)]

    def look(self, path: str) -> SourceFile:
        return SourceFile(path, 3)

    def weight(self, file: SourceFile) -> int:
        return 3

    def cuts(self, file: SourceFile, start: int, first: int, every: int) -> Iterator[int]:
        yield 3

    def scanned(self, file: SourceFile) -> SourceFile:
        return file

    def read(self, part: Part, *, digest: PartDigest | None = None, preview: bool = False) -> Iterator[Sample]:
        for number in range(part.start, part.stop):
            yield Sample(f"{part.file.path}@{number}", LINES[3 * int(part.file.path) + number])

    def digest(self, file: SourceFile, start: int, stop: int) -> int:
        return int(file.path)


Rows = dict[str, tuple[Any, ...]]


@cache
def pristine() -> dict[str, bytes]:
    """A cache of three chunks with columns of codec none, zstd and lz4, failures, constants, and a layer on top."""
    store = fb.MemoryStore()
    fb.build(store, ListSource(), LineRecipe(chunk_rows=1), workers=0)
    fb.build(store, None, LengthLayer(), workers=0)
    assert len(fb.open_cache(store).generation.table("numbers")) == 3
    codecs = {fb.open_cache(store).column(name).codec for name in fb.open_cache(store).columns}
    assert codecs == {"none", "zstd", "lz4"}
    return {entry.key: store.read(entry.key) for entry in store.entries("")}


@cache
def expected() -> list[dict[str, Rows]]:
    """What every chunk of every layer reads as."""
    store = filled(pristine())
    return [{layer: read_chunk(store, layer, chunk) for layer in ("numbers", "length")} for chunk in range(3)]


def chunk_keys() -> dict[tuple[str, int], str]:
    return {
        (layer, chunk): layout.chunk(folder_of(layer), chunk) for layer in ("numbers", "length") for chunk in range(3)
    }


@cache
def folder_of(layer: str) -> str:
    return fb.open_cache(filled(pristine())).generation.folder(layer)


def filled(values: dict[str, bytes]) -> fb.MemoryStore:
    store = fb.MemoryStore()
    for key, value in values.items():
        store.create(key, [value])
    return store


def put(store: fb.MemoryStore, key: str, value: bytes) -> None:
    store.replace(key, [value])


def flipped(value: bytes, position: int) -> bytes:
    return value[:position] + bytes([value[position] ^ 1 << position % 8]) + value[position + 1 :]


def read_chunk(store: fb.MemoryStore, layer: str, chunk: int, opened: fb.Cache | None = None) -> Rows:
    """All rows of one chunk, asked for by number and taken whole; both must agree."""
    opened = opened or fb.open_cache(store)
    names = [name for name, (owner, _) in opened._columns.items() if owner == layer]
    first, stop = opened._starts[chunk : chunk + 2].tolist()
    read = opened.read(np.arange(first, stop), columns=names)
    return {name: _exact(values) for name, values in read.items()}


def outcomes(store: fb.MemoryStore, chunks: Iterable[tuple[str, int]]) -> dict[tuple[str, int], str]:
    """`refused`, or `same` rows; anything else fails. Asked twice: no damage may get through on the second open."""
    wanted, answers = list(chunks), []
    for _ in range(2):
        opened = fb.open_cache(store)
        answers.append({where: _outcome(store, *where, opened) for where in wanted})
    assert answers[0] == answers[1]
    assert set(answers[0].values()) <= {"refused", "same"}
    return answers[0]


def _outcome(store: fb.MemoryStore, layer: str, chunk: int, opened: fb.Cache) -> str:
    try:
        return "same" if read_chunk(store, layer, chunk, opened) == expected()[chunk][layer] else "WRONG ROWS"
    except ForebayError:
        return "refused"


def found_in(report: VerifyReport) -> dict[str, list[tuple[int, int]]]:
    found: dict[str, list[tuple[int, int]]] = {}
    for bad in report.bad:
        found.setdefault(bad.key, []).append((bad.start, bad.stop))
    return found


def _exact(values: Any) -> tuple[Any, ...]:
    if isinstance(values, Ragged):
        return values.values.tobytes(), values.values.dtype, values.offsets.tolist()
    return values.tobytes(), values.dtype, values.shape


def struck_in_chunks(stride: int) -> list[int]:
    """Positions at which some chunk is struck."""
    values = pristine()
    return sorted({position for key in chunk_keys().values() for position in struck(values[key], stride)})


@pytest.mark.parametrize("stride", STRIDES)
def test_every_flipped_byte_of_a_chunk_is_refused_or_changes_nothing_and_verify_finds_its_range(stride: int) -> None:
    store, values = filled(pristine()), pristine()
    keys = chunk_keys()
    refused = same = 0
    for position in struck_in_chunks(stride):
        hit = {where: key for where, key in keys.items() if position < len(values[key])}
        for key in hit.values():
            put(store, key, flipped(values[key], position))
        answers = list(outcomes(store, hit).values())
        refused, same = refused + answers.count("refused"), same + answers.count("same")
        found = found_in(fb.verify(store, source=ListSource()))
        assert sorted(found) == sorted(hit.values()), f"byte {position}"
        assert all(start <= position < stop for ((start, stop),) in found.values())
        for key in hit.values():
            put(store, key, values[key])
    assert refused > 20 * same  # only the list of failures is not needed for reading
    assert fb.verify(store, source=ListSource()).sound


@pytest.mark.parametrize("stride", STRIDES)
def test_chunks_cut_at_every_length_are_refused_and_found(stride: int) -> None:
    store, values = filled(pristine()), pristine()
    keys = {(layer, chunk): layout.chunk(folder_of(layer), chunk) for layer, chunk in (("numbers", 1), ("length", 2))}
    for length in struck(min((values[key] for key in keys.values()), key=len), stride):
        for key in keys.values():
            put(store, key, values[key][:length])
        assert set(outcomes(store, keys).values()) == {"refused"}, length
        if length % 50 == 0 or length > 4096 or length < 2:
            assert sorted(found_in(fb.verify(store, source=ListSource()))) == sorted(keys.values())


@pytest.mark.parametrize("more", [b"\0", b" ", b"\n", b"x" * 7, bytes(4096)])
def test_a_chunk_that_is_longer_than_published_is_refused_and_found(more: bytes) -> None:
    store, values = filled(pristine()), pristine()
    for key in chunk_keys().values():
        put(store, key, values[key] + more)
    assert set(outcomes(store, chunk_keys()).values()) == {"refused"}
    assert sorted(found_in(fb.verify(store, source=ListSource()))) == sorted(chunk_keys().values())


def newest_key() -> str:
    return max(key for key in pristine() if key.startswith(layout.GENERATIONS))


@pytest.mark.parametrize("stride", STRIDES)
def test_every_flipped_byte_of_the_newest_generation_is_refused_and_found(stride: int) -> None:
    key, values = newest_key(), pristine()
    store = filled(values)
    for position in struck(values[key], stride):
        put(store, key, flipped(values[key], position))
        for _ in range(2):
            with pytest.raises(Damaged):
                fb.open_cache(store)
        if position % 16 < 2:
            assert found_in(fb.verify(store, source=ListSource())) == {key: [(-1, -1)]}, position


def test_a_generation_cut_at_every_length_or_longer_is_refused() -> None:
    key, values = newest_key(), pristine()
    store = filled(values)
    for length in range(len(values[key])):
        put(store, key, values[key][:length])
        with pytest.raises(Damaged):
            fb.open_cache(store)
    for more in (b"\0", b" ", b"x" * 7, bytes(4096), values[key]):
        put(store, key, values[key] + more)
        with pytest.raises(Damaged):
            fb.open_cache(store)


def beside_chunks() -> list[str]:
    newest = newest_key()
    return [key for key in pristine() if key != newest and key not in chunk_keys().values()]


@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("key", [
    "cache.json", "plan/000000.safetensors", "recipes/numbers.json", "recipes/length.json",
    "numbers constants", "length constants", "generations/000000.safetensors",
])  # fmt: skip
def test_every_flipped_byte_beside_the_chunks_changes_no_row_and_is_found(key: str, stride: int) -> None:
    layer = "length" if "length" in key else "numbers"
    key = layout.constants(folder_of(layer)) if key.endswith(" constants") else key
    assert key in beside_chunks()
    values = pristine()
    store = filled(values)
    constants = fb.open_cache(store).constants(layer)
    constant = key.endswith("constants.safetensors")
    for position in struck(values[key], stride):
        put(store, key, flipped(values[key], position))
        opened = fb.open_cache(store)
        if position % 16 == 0:
            assert read_chunk(store, layer, 1, opened) == expected()[1][layer], position
        try:
            again = opened.constants(layer)
            assert all(np.array_equal(again[name], constants[name]) for name in constants)
            assert not constant
        except Damaged:
            assert constant
        if position % 8 == 0 or not key.endswith(".safetensors"):
            try:
                assert list(found_in(fb.verify(store, source=ListSource()))) == [key], position
            except IndexCorrupt:  # another cache id: no generation seems to be of this cache
                assert key == layout.CACHE


def test_all_that_a_cache_consists_of_was_flipped_here() -> None:
    tested = {"cache.json", "plan/000000.safetensors", "generations/000000.safetensors"}
    for layer in ("numbers", "length"):
        tested |= {layout.recipe(layer), layout.constants(folder_of(layer))}
    assert set(beside_chunks()) == tested


@pytest.mark.parametrize("column", ["number", "text"])
def test_a_flip_that_is_mended_in_the_sums_is_still_found(column: str) -> None:
    """Whoever also corrects the sum inside the chunk is found out by the digest of the head."""
    key = layout.chunk(folder_of("numbers"), 0)
    values = pristine()
    store = filled(values)
    file = ChunkFile(memoryview(values[key]), key)
    start = file.tensors[column].start
    sums = file.tensors[f"{column}.sums"].start
    put(store, key, flipped(flipped(values[key], start), sums))
    assert outcomes(store, [("numbers", 0)]) == {("numbers", 0): "refused"}
