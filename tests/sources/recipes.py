"""A recipe that keeps documents as they are."""

from collections.abc import Iterable
from typing import ClassVar

import msgspec

from forebay.columns import Column, Ragged
from forebay.recipe import ChunkTarget, RecipeHooks, Rows
from forebay.source import Sample


class TextRecipe(RecipeHooks, msgspec.Struct, frozen=True, kw_only=True):
    """One row per document: its text in UTF-8, and its id."""

    kind: ClassVar[str] = "test-text"
    revision: ClassVar[int] = 1
    sample_ids: ClassVar[str] = "id"

    chunk_rows: int = 10

    def columns(self) -> tuple[Column, ...]:
        return Column(name="text", dtype="uint8", ragged=True), Column(name="id", dtype="uint8", ragged=True)

    def chunk_target(self) -> ChunkTarget:
        return ChunkTarget(rows=self.chunk_rows)

    def make(self, samples: Iterable[Sample]) -> Rows:
        taken = list(samples)
        documents = Ragged.of_bytes([sample.data.encode() for sample in taken])
        return Rows({"text": documents, "id": Ragged.of_bytes([sample.id.encode() for sample in taken])})
