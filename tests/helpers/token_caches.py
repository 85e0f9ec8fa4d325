"""Small token caches: rows that say which row they are, in chunks of their own sizes.

Every row is the token `number % 50_000` repeated, with documents of lengths that only depend on the number; so any row
of any batch can be told, and every derived tensor worked out again.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import ClassVar, Literal

import msgspec
import numpy as np

import forebay as fb
from forebay.columns import Codec

PADDING = 65_535


class NumberedTokens(fb.RecipeHooks, msgspec.Struct, frozen=True, kw_only=True):
    """A line that holds a number becomes a row of tokens that tells the number; a line that holds none has no row."""

    kind: ClassVar[str] = "tokens"
    revision: ClassVar[int] = 1

    sequence_length: int = 8
    chunk_rows: int = 5
    codec: Codec = "none"
    rows_per_block: int = 2
    token_dtype: Literal["uint16", "uint32"] = "uint16"
    length_dtype: Literal["uint16", "uint32"] = "uint32"

    def columns(self) -> tuple[fb.Column, ...]:
        shared = {"codec": self.codec, "rows_per_block": self.rows_per_block}
        return (
            fb.Column(name="tokens", dtype=self.token_dtype, shape=(self.sequence_length,), **shared),
            fb.Column(name="seq_lens", dtype=self.length_dtype, ragged=True, **shared),
            fb.Column(name="documents", dtype="uint32", shape=(2,), ragged=True, **shared),
        )

    def chunk_target(self) -> fb.ChunkTarget:
        return fb.ChunkTarget(rows=self.chunk_rows)

    def make(self, samples: Iterable[fb.Sample]) -> fb.Rows:
        lines = [bytes(sample.data).strip() for sample in samples]
        numbers = [int(line) for line in lines if line.isdigit()]
        lengths = [document_lengths(number, self.sequence_length) for number in numbers]
        tokens = [row_tokens(number, each, self.sequence_length) for number, each in zip(numbers, lengths, strict=True)]
        documents = [
            np.stack([np.full(len(each), number), np.cumsum(each) - each], axis=1).astype(np.uint32)
            for number, each in zip(numbers, lengths, strict=True)
        ]
        return fb.Rows(
            {
                "tokens": np.array(tokens, self.token_dtype).reshape(-1, self.sequence_length),
                "seq_lens": fb.Ragged.of(lengths, np.dtype(self.length_dtype)),
                "documents": fb.Ragged.of(documents, np.dtype("u4"), (2,)),
            }
        )


def document_lengths(number: int, sequence_length: int) -> np.ndarray:
    """Of one to three documents, full or with padding, as the number says."""
    cuts = np.linspace(0, sequence_length - number % 3, number % 3 + 2).astype(np.uint32)
    lengths = np.diff(cuts)
    return lengths[lengths > 0].astype(np.uint32)


def row_tokens(number: int, lengths: np.ndarray, sequence_length: int) -> np.ndarray:
    tokens = np.full(sequence_length, PADDING, np.uint16)
    tokens[: lengths.sum()] = number % 50_000
    return tokens


def write_numbers(path: Path, numbers: Iterable[int]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{number:07d}\n" for number in numbers))
    return path


def token_cache(folder: Path, rows: int, **fields: object) -> Path:
    """A cache of the numbers from 0 on."""
    write_numbers(folder / "raw" / "a.txt", range(rows))
    fb.build(folder / "cache", fb.sources.lines(folder / "raw"), NumberedTokens(**fields), workers=0)
    return folder / "cache"


def grow_cache(folder: Path, first: int, rows: int) -> None:
    """The numbers from `first` on, appended to the cache of a folder as a new generation."""
    write_numbers(folder / "raw" / f"b{first:07d}.txt", range(first, first + rows))
    fb.update(folder / "cache", fb.sources.lines(folder / "raw"), recipe=recipe_of(folder), workers=0)


def recipe_of(folder: Path) -> NumberedTokens:
    return NumberedTokens(**fb.open_cache(folder / "cache").recipe("tokens").fields)


def numbers_of(batches: Iterable[dict]) -> list[list[int]]:
    """The numbers of the rows of every batch."""
    return [batch["tokens"][:, 0].tolist() for batch in batches]


def interleaved(starts: Sequence[int], by_rank: Sequence[list[list[int]]]) -> list[list[int]]:
    """The global batches, from these positions on, that the batches of all ranks make: rank p % ranks has p."""
    found = []
    for start, *parts in zip(starts, *by_rank, strict=True):
        taken = [iter(part) for part in parts]
        positions = range(start, start + sum(map(len, parts)))
        found.append([next(taken[position % len(parts)]) for position in positions])
    return found
