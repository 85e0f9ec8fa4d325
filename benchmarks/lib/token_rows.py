"""Token rows of any number from one stream of GPT-2 ids, read again and again.

Every row is full; documents are cut at the end of a row. The length of the stream is no multiple of a row's, so rows
differ.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import ClassVar, NamedTuple

import fastokens
import msgspec
import numpy as np

import forebay as fb
from benchmarks.lib.corpus import documents
from benchmarks.lib.files import into_memory, prepared
from benchmarks.lib.number_source import NumberSource
from benchmarks.lib.options import Options
from forebay.columns import Codec
from forebay.tokens.vocabulary import gpt2_json

LENGTH = 2048
CHUNK_ROWS = 8000
PACKED_BLOCK_ROWS = 64  # 128 K tokens


class StreamRecipe(fb.RecipeHooks, msgspec.Struct, frozen=True, kw_only=True):
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


def write_stream(folder: Path, texts: list[str]) -> None:
    """The GPT-2 ids of documents end to end, and where each document stops."""
    tokenizer = fastokens.Tokenizer.from_json_str(gpt2_json().decode())
    ids = [
        np.frombuffer(tokenizer.encode_batch_flat([text], split_special_tokens=True)[0], np.uint32) for text in texts
    ]
    folder.mkdir()
    np.concatenate(ids).astype(np.uint16).tofile(folder / "tokens")
    np.cumsum([len(one) for one in ids], dtype=np.int64).tofile(folder / "documents")


@dataclass(frozen=True)
class TokenRows:
    """The same rows in a cache per codec and in plain files, in the page cache."""

    folder: Path
    rows: int

    @classmethod
    def of(cls, options: Options) -> "TokenRows":
        rows = 20_000 if options.is_quick else 200_000
        folder = options.folder / f"tokens-{rows}"
        prepared(folder / "stream", str(options.text), lambda place: write_stream(place, documents(options.text)))
        return cls(folder, rows)

    def cache(self, codec: Codec) -> fb.Cache:
        recipe = StreamRecipe(stream=str(self.folder / "stream"), codec=codec)
        root = prepared(
            self.folder / codec, fb.fingerprint(recipe), lambda root: fb.build(root, NumberSource(self.rows), recipe)
        )
        into_memory(root)
        return fb.open_cache(root)

    def plain(self) -> "PlainRows":
        folder = prepared(self.folder / "plain", str(self.rows), lambda place: write_plain(self.cache("none"), place))
        into_memory(folder)
        return open_plain(folder)


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
