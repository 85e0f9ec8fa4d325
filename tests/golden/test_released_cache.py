"""A small cache of every release, kept in git and read by every later one.

`cache-0.1.0` was made once, by `make_released_cache` below, and is never made again. A release adds its own beside it.
"""

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

import ml_dtypes
import msgspec
import numpy as np
import pytest

import forebay as fb
from forebay.columns import Array, Column, Columns, Ragged
from forebay.recipe import ChunkTarget, Rows
from forebay.source import Failure, Sample

RELEASES = sorted(path.name for path in Path(__file__).parent.glob("cache-*"))
WORDS = [b"water", b"is", b"", b"collected", b"there", b"once", b"and", b"leaves", b"at", b"full", b"flow"]


class WordRecipe(msgspec.Struct, frozen=True, kw_only=True):
    """What `cache-0.1.0` was made by: something of everything the format knows."""

    kind: ClassVar[str] = "words"
    revision: ClassVar[int] = 1
    sample_ids: ClassVar[str] = "word"

    chunk_rows: int = 4

    def columns(self) -> tuple[Column, ...]:
        return (
            Column(name="word", dtype="uint8", ragged=True, codec="lz4", rows_per_block=2),
            Column(name="length", dtype="int32"),
            Column(name="halves", dtype="bfloat16", shape=(2,), codec="zstd", rows_per_block=3),
            Column(name="pairs", dtype="uint16", shape=(2,), ragged=True),
        )

    def chunk_target(self) -> ChunkTarget:
        return ChunkTarget(rows=self.chunk_rows)

    def constants(self) -> dict[str, Array]:
        return {"alphabet": np.frombuffer(b"abc", np.uint8)}

    def make(self, samples: Iterable[Sample]) -> Rows:
        taken = list(samples)
        words = [bytes(sample.data) for sample in taken if sample.data]
        failures = tuple(Failure(sample.id, "empty", "no word") for sample in taken if not sample.data)
        lengths = np.array([len(word) for word in words], np.int32)
        pairs = [np.array([[i, i * i] for i in range(len(word) % 3)], np.uint16).reshape(-1, 2) for word in words]
        columns: Columns = {
            "word": Ragged.of_bytes(words),
            "length": lengths,
            "halves": np.stack([lengths / 2, -lengths / 2], axis=1).astype(ml_dtypes.bfloat16),
            "pairs": Ragged.of(pairs, np.dtype("<u2"), (2,)),
        }
        even_odd = np.bincount(lengths % 2, minlength=2).tolist()
        return Rows(columns, failures, {"letters": int(lengths.sum()), "even_odd": even_odd})


class VowelLayer(msgspec.Struct, frozen=True, kw_only=True):
    kind: ClassVar[str] = "vowels"
    revision: ClassVar[int] = 1
    reads: ClassVar[tuple[str, ...]] = ("word",)

    def columns(self) -> tuple[Column, ...]:
        return (Column(name="vowels", dtype="uint8", codec="zstd"),)

    def make(self, rows: Columns) -> Rows:
        words = rows["word"]
        assert isinstance(words, Ragged)
        counts = [sum(letter in b"aeiou" for letter in words[row].tolist()) for row in range(len(words))]
        present = np.array([count < 3 for count in counts])
        return Rows({"vowels": np.array(counts, np.uint8) * present}, present=present)


def make_released_cache(folder: Path) -> None:
    """How the cache was made; for the next release, not for this one."""
    (folder / "raw").mkdir(parents=True)
    (folder / "raw/words.txt").write_bytes(b"\n".join(WORDS[:8]) + b"\n")
    fb.build(folder / "cache", fb.sources.lines(folder / "raw"), WordRecipe(), workers=0)
    (folder / "raw/words.txt").write_bytes(b"\n".join(WORDS) + b"\n")
    fb.grow(folder / "cache", fb.sources.lines(folder / "raw"), recipe=WordRecipe(), workers=0)
    fb.build(folder / "cache", None, VowelLayer(), workers=0)


@pytest.fixture(params=RELEASES)
def released(request: pytest.FixtureRequest) -> Path:
    return Path(__file__).parent / request.param


def test_there_is_a_cache_of_the_first_release() -> None:
    assert "cache-0.1.0" in RELEASES


def test_its_rows_are_what_they_were(released: Path) -> None:
    cache = fb.open_cache(released, layers=["vowels"])
    words = [word for word in WORDS if word]
    assert cache.columns == ("word", "length", "halves", "pairs", "vowels", "vowels.present")
    assert len(cache) == len(words) == 10
    order = [9, 0, 3, 3, 7]
    read = cache.read(order)
    assert [bytes(read["word"][at]) for at in range(5)] == [words[row] for row in order]
    assert read["length"].tolist() == [len(words[row]) for row in order]
    assert read["halves"].dtype == ml_dtypes.bfloat16
    assert read["halves"].astype(float).tolist() == [[len(words[row]) / 2, -len(words[row]) / 2] for row in order]
    assert read["pairs"].lengths.tolist() == [len(words[row]) % 3 for row in order]
    assert read["pairs"][1].tolist() == [[0, 0], [1, 1]]
    assert read["vowels.present"].tolist() == [True, True, True, True, True]
    whole = cache.read(range(10), columns=["vowels"])
    assert whole["vowels"].tolist() == [2, 1, 0, 2, 2, 1, 0, 1, 1, 1]
    assert whole["vowels.present"].tolist() == [True, True, False, True, True, True, False, True, True, True]
    assert cache.constants("words")["alphabet"].tobytes() == b"abc"


def test_it_verifies_and_says_what_it_is(released: Path, tmp_path: Path) -> None:
    root = shutil.copytree(released, tmp_path / "cache")
    report = fb.verify(root, full=True)
    assert (report.bad, report.missing, report.gaps, report.foreign) == ((), {}, {}, ())
    summary = fb.summarize(root)
    assert (summary.base, summary.rows, summary.source_files) == ("words", 10, 1)
    layers = {layer.layer: layer for layer in summary.layers}
    assert layers["words"].statistics == {"letters": 44, "even_odd": [6, 4]}
    assert (layers["words"].failures, layers["vowels"].rows) == (1, 10)
    assert layers["words"].fingerprint == fb.fingerprint(WordRecipe())


def test_its_first_generation_still_has_its_rows(released: Path) -> None:
    cache = fb.open_cache(released, generation=0)
    assert [bytes(row["word"]) for row in cache] == [word for word in WORDS[:8] if word]


def test_what_is_made_today_is_the_same_to_the_byte_where_the_libraries_are(released: Path, tmp_path: Path) -> None:
    """Only the files of the released version's own format and libraries can be compared."""
    make_released_cache(tmp_path)
    if fb.summarize(released).versions != fb.summarize(tmp_path / "cache").versions:
        pytest.skip("other versions of Python, numpy or a codec made the released cache")
    for path in sorted((released / "layers").rglob("*.safetensors")):
        today = tmp_path / "cache" / path.relative_to(released)
        assert today.read_bytes() == path.read_bytes(), path.name
