"""Samples kept as they are."""

from collections.abc import Iterable
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from forebay.columns import CodecField, Column, LevelField, Ragged
from forebay.errors import RecipeInvalid
from forebay.fields import Size
from forebay.recipe import ChunkTarget, RecipeHooks, RecipeMeta, Rows, check_fields
from forebay.source import Failure, Sample


class RawRecipe(
    RecipeHooks, msgspec.Struct, metaclass=RecipeMeta, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """Store samples unchanged: one row per file or line.

    The column `data` has the bytes of a sample, `id` its name. A sample longer than `max_sample_bytes` is recorded as a
    failure, not stored. Teacher layers have the chunks of the base layer: `chunk_rows` fits them to what teachers make.
    """

    kind: ClassVar[str] = "raw"
    revision: ClassVar[int] = 1
    sample_ids: ClassVar[str] = "id"
    located: ClassVar[tuple[str, ...]] = ("chunk_rows",)  # the plan keeps where chunks begin

    codec: CodecField = "zstd"
    level: LevelField = "default"
    rows_per_block: Annotated[int, Meta(ge=0, description="Rows per compressed block; 0: automatic.")] = 64
    chunk_bytes: Annotated[Size, Meta(description="Decoded size of a chunk.")] = 16 * 1024 * 1024
    chunk_rows: Annotated[
        int, Meta(ge=0, description="Most rows of a chunk, for teacher layers; 0: by --chunk-bytes.")
    ] = 0
    max_sample_bytes: Annotated[Size, Meta(description="Fail longer samples.")] = 64 * 1024 * 1024

    def __post_init__(self) -> None:
        check_fields(self)

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
        if self.chunk_rows:
            return ChunkTarget(rows=self.chunk_rows, most_samples=self.chunk_rows)
        return ChunkTarget(bytes=self.chunk_bytes)

    def make(self, samples: Iterable[Sample]) -> Rows:
        stored: list[Sample] = []
        failures: list[Failure] = []
        for sample in samples:
            if not isinstance(sample.data, bytes | bytearray | memoryview):
                raise RecipeInvalid(
                    f"a raw cache keeps bytes, and sample '{sample.id}' of its source is of type "
                    f"{type(sample.data).__name__}",
                    hint="use the recipe for such samples, or a source of bytes",
                )
            if len(sample.data) > self.max_sample_bytes:
                failures.append(Failure(sample.id, "too-long", f"{len(sample.data):,} bytes"))
            else:
                stored.append(sample)
        data = Ragged.of_bytes([sample.data for sample in stored])
        ids = Ragged.of_bytes([sample.id.encode("utf-8", "surrogateescape") for sample in stored])
        statistics = {"bytes": int(data.values.nbytes)}
        return Rows({"data": data, "id": ids}, tuple(failures), statistics)


__all__ = ["RawRecipe"]
