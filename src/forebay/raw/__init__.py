"""Samples kept as they are."""

from collections.abc import Iterable
from typing import ClassVar

import msgspec

from forebay.columns import Codec, Column, Level, Ragged
from forebay.errors import RecipeInvalid
from forebay.recipe import ChunkTarget, RecipeHooks, Rows
from forebay.source import Failure, Sample


class RawRecipe(RecipeHooks, msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keep every sample's bytes in the column `data`, its id in `id`.

    A sample longer than `max_sample_bytes` is recorded as a failure, not stored.
    """

    kind: ClassVar[str] = "raw"
    revision: ClassVar[int] = 1
    sample_ids: ClassVar[str] = "id"

    codec: Codec = "zstd"
    level: Level = "default"
    rows_per_block: int = 64
    chunk_bytes: int = 16 * 1024 * 1024
    max_sample_bytes: int = 64 * 1024 * 1024

    def columns(self) -> tuple[Column, ...]:
        return (
            Column(
                name="data",
                dtype="uint8",
                ragged=True,
                codec=self.codec,
                level=self.level,
                rows_per_block=self.rows_per_block,
            ),
            Column(name="id", dtype="uint8", ragged=True, codec=self.codec, level=self.level),
        )

    def chunk_target(self) -> ChunkTarget:
        return ChunkTarget(bytes=self.chunk_bytes)

    def make(self, samples: Iterable[Sample]) -> Rows:
        kept: list[Sample] = []
        failures: list[Failure] = []
        for sample in samples:
            if not isinstance(sample.data, bytes | bytearray | memoryview):
                raise RecipeInvalid(
                    f"a raw cache keeps bytes, and sample '{sample.id}' of its source is of type "
                    f"{type(sample.data).__name__}; use the recipe for such samples, or a source of bytes"
                )
            if len(sample.data) > self.max_sample_bytes:
                failures.append(Failure(sample.id, "too-long", f"{len(sample.data):,} bytes"))
            else:
                kept.append(sample)
        data = Ragged.of_bytes([sample.data for sample in kept])
        ids = Ragged.of_bytes([sample.id.encode("utf-8", "surrogateescape") for sample in kept])
        statistics = {"bytes": int(data.values.nbytes)}
        return Rows({"data": data, "id": ids}, tuple(failures), statistics)


__all__ = ["RawRecipe"]
