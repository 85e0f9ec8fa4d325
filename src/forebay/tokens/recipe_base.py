"""Fields and hooks of the recipes that have a tokenizer: tokens, chat, preferences."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any

import msgspec
import xxhash
from msgspec import Meta

from forebay.columns import CodecField, Column, Dtype, LevelField
from forebay.errors import RecipeInvalid
from forebay.recipe import ChunkTarget, RecipeHooks, RecipeMeta, check_fields
from forebay.source import Sample
from forebay.tokens.encoders import ENCODERS, EncoderChoice, EncoderName, choose_encoder, encoder_version
from forebay.tokens.vocabulary import Vocabulary, is_on_hub, load_vocabulary

BLOCK_TOKENS = 128 * 1024  # compresses a fifth better than 16 K, decodes in a third of a millisecond
MOST_TOKENS = 1 << 24  # of a row
SequenceLength = Annotated[int, Meta(ge=1, le=MOST_TOKENS, description="Tokens per row.")]
ChunkRows = Annotated[int, Meta(ge=1, description="Rows per chunk.")]


class TokenizedRecipe(
    RecipeHooks, msgspec.Struct, metaclass=RecipeMeta, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """The base of recipes that encode texts with a tokenizer."""

    tokenizer: str
    sequence_length: SequenceLength
    chunk_rows: ChunkRows
    pad: Annotated[str | int, Meta(description="Padding token.", extra={"default": "by tokenizer, else 0"})] = "auto"
    deduplicate: Annotated[
        bool,
        Meta(
            description="Drop duplicate samples, or keep them.",
            extra={"flags": ["--deduplicate/--keep-duplicates"], "default": "keep"},
        ),
    ] = False
    codec: CodecField = "zstd"
    level: LevelField = "fast"
    rows_per_block: Annotated[int, Meta(ge=0, description="Rows per compressed block; 0: by row length.")] = 0
    encoder: Annotated[
        EncoderChoice, Meta(description="Tokenizer backend; auto uses fastokens if it matches the reference.")
    ] = "auto"

    def __post_init__(self) -> None:
        check_fields(self)
        self._check_ids(pad=self.pad)

    def _check_ids(self, **tokens: str | int | None) -> None:
        for name, token in tokens.items():
            if isinstance(token, int) and token < 0:
                raise RecipeInvalid(f"{name} must be a token or an id of at least 0 (got {token})")

    def chunk_target(self) -> ChunkTarget:
        return ChunkTarget(rows=self.chunk_rows)

    def versions(self) -> Mapping[str, str]:
        return {name: version for name in ENCODERS if (version := encoder_version(name))}

    @property
    def identity(self) -> Callable[[Sample], bytes | None] | None:
        """With `deduplicate`, samples with the same text are duplicates."""
        return text_identity if self.deduplicate else None

    def on_hub(self) -> tuple[str, ...]:
        """The tokenizer, if it would be downloaded."""
        return (self.tokenizer,) if is_on_hub(self.tokenizer) else ()

    def rows_from(self, statistics: Mapping[str, Any]) -> float:
        """In a large chunk nearly every row is full."""
        tokens: int = statistics["tokens"]
        return tokens / self.sequence_length

    def vocabulary(self) -> Vocabulary:
        return load_vocabulary(self.tokenizer)

    def columns(self) -> tuple[Column, ...]:
        column = self._column()
        return (
            column(name="tokens", dtype=self._dtype(), shape=(self.sequence_length,)),
            column(name="seq_lens", dtype="uint32", ragged=True),
            column(name="documents", dtype="uint32", shape=(2,), ragged=True),
        )

    def _column(self) -> Callable[..., Column]:
        """Large blocks compress better; without a codec, blocks are only units of checking."""
        automatic = 0 if self.codec == "none" else max(1, BLOCK_TOKENS // self.sequence_length)
        return partial(Column, codec=self.codec, level=self.level, rows_per_block=self.rows_per_block or automatic)

    def _dtype(self) -> Dtype:
        return "uint16" if self.vocabulary().size <= 1 << 16 else "uint32"

    def _encoder(self, *, control: bool = False) -> EncoderName:
        if self.encoder != "auto":
            return self.encoder
        return choose_encoder("auto", self.vocabulary(), (), planned=False, control=control)[0]


def text_identity(sample: Sample) -> bytes | None:
    """A hash of the text; None for a sample that is not text or empty, which fails anyway."""
    data = sample.data.encode("utf-8", "surrogatepass") if isinstance(sample.data, str) else sample.data
    digest: bytes | None = xxhash.xxh3_128_digest(data) if isinstance(data, bytes) and data else None
    return digest
