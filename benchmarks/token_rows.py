"""Caches of real tokens of any size: one stream of GPT-2 ids, read round and round, cut into rows.

Rows are cut where they end, without packing, so that every row is full; documents fall where they fall. The stream's
length is no multiple of a row's, so no row comes twice until the stream has been read as often as a row is long.
"""

from collections.abc import Iterable
from functools import cache, partial
from pathlib import Path
from typing import ClassVar, NamedTuple

import msgspec
import numpy as np

import forebay as fb
from benchmarks.numbers import NumberSource
from forebay.columns import Codec

LENGTH = 2048
CHUNK_ROWS = 8000
PACKED_BLOCK_ROWS = 64  # 128 K tokens


class StreamRecipe(msgspec.Struct, frozen=True, kw_only=True):
    """Row `number` is the `LENGTH` tokens from `number * LENGTH` on."""

    kind: ClassVar[str] = "tokens"
    revision: ClassVar[int] = 1

    stream: str
    codec: Codec = "none"

    def columns(self) -> tuple[fb.Column, ...]:
        block_rows = 0 if self.codec == "none" else PACKED_BLOCK_ROWS
        stored = partial(fb.Column, codec=self.codec, rows_per_block=block_rows)
        return (
            stored(name="tokens", dtype="uint16", shape=(LENGTH,)),
            stored(name="seq_lens", dtype="uint32", ragged=True),
            stored(name="documents", dtype="uint32", shape=(2,), ragged=True),
        )

    def chunk_target(self) -> fb.ChunkTarget:
        return fb.ChunkTarget(rows=CHUNK_ROWS)

    def make(self, samples: Iterable[fb.Sample]) -> fb.Rows:
        stream = open_stream(self.stream)
        starts = np.array([sample.data for sample in samples], np.int64) * LENGTH % stream.length
        rows = np.lib.stride_tricks.sliding_window_view(stream.tokens, LENGTH)
        low = np.searchsorted(stream.begins, starts, "right")
        high = np.searchsorted(stream.begins, starts + LENGTH, "left")
        lengths, documents = [], []
        for start, first, last in zip(starts.tolist(), low.tolist(), high.tolist(), strict=True):
            cuts = np.concatenate([[start], stream.begins[first:last], [start + LENGTH]])
            lengths.append(np.diff(cuts))
            documents.append(
                np.stack([np.arange(first - 1, last), cuts[:-1] - stream.begins[first - 1 : last]], axis=1)
            )
        return fb.Rows(
            {
                "tokens": rows[starts],
                "seq_lens": fb.Ragged.of(lengths, np.dtype("u4")),
                "documents": fb.Ragged.of(documents, np.dtype("u4"), (2,)),
            }
        )


class TokenStream(NamedTuple):
    """Tokens and where documents begin; both go on after the end as from the beginning, by a row or more."""

    tokens: np.ndarray
    begins: np.ndarray
    length: int


@cache
def open_stream(folder: str) -> TokenStream:
    tokens = np.fromfile(f"{folder}/tokens", np.uint16)
    stops = np.fromfile(f"{folder}/documents", np.int64)
    begins = np.concatenate([[0], stops, stops + len(tokens)])
    return TokenStream(np.append(tokens, tokens[:LENGTH]), begins, len(tokens))


def build_tokens(root: Path, stream: Path, rows: int, codec: Codec) -> None:
    fb.build(root, NumberSource(rows), StreamRecipe(stream=str(stream), codec=codec))


class PlainRows(NamedTuple):
    """The same rows in plain files, for numpy.memmap."""

    tokens: np.ndarray  # (rows, LENGTH)
    lengths: np.ndarray
    offsets: np.ndarray


def write_plain(cache_: fb.Cache, folder: Path) -> None:
    """Copy the columns of a cache into one file each."""
    folder.mkdir(parents=True)
    counts = []
    with open(folder / "tokens", "wb") as tokens, open(folder / "lengths", "wb") as lengths:
        for columns in cache_.chunks(["tokens", "seq_lens"]):
            columns["tokens"].tofile(tokens)
            columns["seq_lens"].values.tofile(lengths)
            counts.append(columns["seq_lens"].lengths)
    np.cumsum(np.append(0, np.concatenate(counts)), dtype=np.int64).tofile(folder / "offsets")


def open_plain(folder: Path) -> PlainRows:
    return PlainRows(
        np.memmap(folder / "tokens", np.uint16, "r").reshape(-1, LENGTH),
        np.memmap(folder / "lengths", np.uint32, "r"),
        np.memmap(folder / "offsets", np.int64, "r"),
    )
