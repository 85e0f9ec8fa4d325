"""Token caches of real text without a tokenizer: the bytes of lines are the tokens, and lines are the documents."""

from collections.abc import Iterable
from typing import ClassVar

import msgspec
import numpy as np

import forebay as fb

END = 256
VOCABULARY = 257


class ByteTokens(fb.RecipeHooks, msgspec.Struct, frozen=True, kw_only=True):
    """Lines end to end, cut into rows; the last row of a chunk is padded with zeros."""

    kind: ClassVar[str] = "tokens"
    revision: ClassVar[int] = 1

    sequence_length: int = 64
    chunk_rows: int = 16

    def columns(self) -> tuple[fb.Column, ...]:
        return (
            fb.Column(name="tokens", dtype="uint16", shape=(self.sequence_length,)),
            fb.Column(name="seq_lens", dtype="uint32", ragged=True),
            fb.Column(name="documents", dtype="uint32", shape=(2,), ragged=True),
        )

    def chunk_target(self) -> fb.ChunkTarget:
        return fb.ChunkTarget(rows=self.chunk_rows)

    def make(self, samples: Iterable[fb.Sample]) -> fb.Rows:
        width = self.sequence_length
        lines = [np.append(np.frombuffer(sample.data, np.uint8), END).astype(np.uint16) for sample in samples]
        tokens = np.concatenate(lines)
        begins = np.cumsum([0, *map(len, lines)])
        cuts = np.union1d(begins, np.arange(0, len(tokens), width))
        document = np.searchsorted(begins, cuts[:-1], "right") - 1
        pieces = np.stack([document, cuts[:-1] - begins[document]], axis=1).astype(np.uint32)
        rows = -(-len(tokens) // width)
        per_row = np.searchsorted(cuts[:-1], np.arange(rows + 1) * width)
        return fb.Rows(
            {
                "tokens": np.pad(tokens, (0, rows * width - len(tokens))).reshape(rows, width),
                "seq_lens": fb.Ragged(np.diff(cuts).astype(np.uint32), per_row),
                "documents": fb.Ragged(pieces, per_row),
            }
        )
