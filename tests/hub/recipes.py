"""A recipe that keeps documents as they are."""

from collections.abc import Iterable
from typing import ClassVar

import msgspec

from forebay.columns import Column, Ragged
from forebay.recipe import ChunkTarget, RecipeHooks, Rows
from forebay.source import Sample


class DocumentRecipe(RecipeHooks, msgspec.Struct, frozen=True, kw_only=True):
    """The text of every document and its id, `rows` to a chunk."""

    kind: ClassVar[str] = "documents"
    revision: ClassVar[int] = 1
    sample_ids: ClassVar[str] = "id"

    rows: int = 10

    def columns(self) -> tuple[Column, ...]:
        return (Column(name="data", dtype="uint8", ragged=True), Column(name="id", dtype="uint8", ragged=True))

    def chunk_target(self) -> ChunkTarget:
        return ChunkTarget(rows=self.rows)

    def make(self, samples: Iterable[Sample]) -> Rows:
        taken = list(samples)
        data = Ragged.of_bytes([sample.data.encode() for sample in taken])
        return Rows({"data": data, "id": Ragged.of_bytes([sample.id.encode() for sample in taken])})
