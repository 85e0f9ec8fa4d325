"""The token recipe: documents to packed rows, with statistics."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta

from forebay.columns import DTYPES, Array
from forebay.errors import RecipeInvalid, SourceInvalid
from forebay.fields import Size
from forebay.recipe import Rows
from forebay.source import Sample, Source, SourceFile
from forebay.tokens.encoders import choose_encoder, open_encoder
from forebay.tokens.packing import Frame, LongDocuments, cut_long, encode_documents, in_order, pack_rows
from forebay.tokens.piecewise import MAX_UNCUT_BYTES, PiecewiseEncoder
from forebay.tokens.recipe_base import ChunkRows, SequenceLength, TokenizedRecipe
from forebay.tokens.vocabulary import CONSTANT, GPT2, TOKENIZER_FILE, Vocabulary, vocabulary_in

_JSON_LINES = re.compile(r"\.(jsonl|ndjson)(\.\w+)?$", re.IGNORECASE)  # compressed or not
USE_BINS = 20  # histogram of used shares of rows: [0, 5%), [5, 10%), … [95, 100%), and full rows


def row_statistics(
    lengths: Array, cut_lengths: Array, columns: Mapping[str, Any], characters: int, capacity: int
) -> dict[str, int | float | list[int]]:
    """The counts of one chunk, which are summed over chunks."""
    seq_lens = columns["seq_lens"]
    used = np.diff(np.concatenate([[0], np.cumsum(seq_lens.values, dtype=np.int64)])[seq_lens.offsets])
    return {
        "documents": int(np.count_nonzero(cut_lengths)),
        "documents_dropped": int(np.count_nonzero(cut_lengths == 0)),
        "documents_split": int(np.count_nonzero(cut_lengths > capacity)),
        "documents_cut": int(np.count_nonzero((cut_lengths < lengths) & (cut_lengths > 0))),
        "characters": characters,
        "tokens_in": int(lengths.sum()),
        "tokens": int(used.sum()),
        "tokens_dropped": int((lengths - cut_lengths).sum()),
        "raw_bytes": sum(column.nbytes for column in columns.values()),
        "rows_by_use": np.bincount(used * USE_BINS // capacity, minlength=USE_BINS + 1).tolist(),
    }


def token_figures(fields: Mapping[str, Any], statistics: Mapping[str, Any], holds: Mapping[str, int]) -> dict[str, Any]:
    capacity = holds["rows"] * fields["sequence_length"]
    tokens, stored = statistics.get("tokens", 0), holds["bytes"]
    return {
        "padding_share": _ratio(capacity - tokens, capacity),
        "utilization": _ratio(tokens, capacity),
        "tokens_dropped_share": _ratio(statistics.get("tokens_dropped", 0), statistics.get("tokens_in", 0)),
        "bytes_per_token": _ratio(stored, tokens),
        "bits_per_token": _ratio(8 * stored, tokens),
        "compression_ratio": _ratio(statistics.get("raw_bytes", 0), stored),
        "characters_per_token": _ratio(statistics.get("characters", 0), statistics.get("tokens_in", 0)),
        "tokens_per_document": _ratio(tokens, statistics.get("documents", 0)),
    }


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


SAMPLE_CHARS = 16 * 1024  # of a document, for comparing two encoders


class Ids(NamedTuple):
    """The ids of begin, end and padding. Padding is recognized by `seq_lens`, never by its id."""

    eos: int | None
    bos: int | None
    pad: int


class TokenRecipe(TokenizedRecipe, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Pack text into rows of tokens: fixed length, best fit, with document boundaries.

    `tokenizer` is `"gpt2"`, a path to a `tokenizer.json` or a hub name. `eos` ends every document, `bos` begins it;
    each is a token's text, its id, or None. `encoder="auto"` is resolved when a cache is planned, and stored.
    """

    kind: ClassVar[str] = "tokens"
    revision: ClassVar[int] = 1
    located: ClassVar[tuple[str, ...]] = ("tokenizer",)  # a location: the fingerprint has the hash of the file instead
    source_settings: ClassVar[str] = "forebay.sources.source_settings:TextSettings"

    tokenizer: Annotated[
        str,
        Meta(
            description="gpt2, a path to a tokenizer.json, or org/name on the hub.",
            extra={"format": "file", "metavar": "TOKENIZER"},
        ),
    ] = GPT2
    sequence_length: SequenceLength = 512
    long: Annotated[LongDocuments, Meta(description="How to treat documents longer than a row.")] = "split"
    chunk_rows: ChunkRows = 8000
    eos: Annotated[
        str | int | None,
        Meta(description="Token that ends a document, or none.", extra={"default": "by vocabulary"}),
    ] = "auto"
    bos: Annotated[
        str | int | None, Meta(description="Token that begins a document, or none.", extra={"default": "none"})
    ] = None
    max_uncut_bytes: Annotated[  # unset, it is not part of the fingerprint
        Size | msgspec.UnsetType,
        Meta(
            description="Reject documents with an unsplittable run longer than this.",
            extra={"default": "4MB; with tokenizers 1.5MB"},
        ),
    ] = msgspec.UNSET

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sequence_length <= (self.eos is not None) + (self.bos is not None):
            raise RecipeInvalid(f"sequence_length {self.sequence_length} leaves no room for text besides eos and bos")
        self._check_ids(eos=self.eos, bos=self.bos)

    def dependencies(self) -> Mapping[str, str]:
        return {TOKENIZER_FILE: self.vocabulary().sha256}

    def constants(self) -> Mapping[str, Array]:
        """The tokenizer, so that a copied cache can be read as text."""
        return {CONSTANT: np.frombuffer(self.vocabulary().json, np.uint8)}

    def check_source(self, source: Source, files: Sequence[SourceFile]) -> None:
        """Reject JSON lines that the source reads as plain text."""
        if source.kind not in ("files", "lines", "text"):
            return
        path = next((file.path for file in files if _JSON_LINES.search(file.path)), None)
        if path is not None:
            raise SourceInvalid(
                f"'{path}' holds JSON lines, and this source (kind '{source.kind}') reads them as plain text",
                hint="read a field with fb.sources.jsonl (--format jsonl), or name the file .txt to tokenize the JSON",
                path=path,
            )

    def settled(
        self, stored: Mapping[str, Any] | None, samples: Callable[[], Iterable[Sample]]
    ) -> tuple["TokenRecipe", tuple[str, ...]]:
        """The recipe with its encoder chosen and its tokens as ids, and notes about the choice."""
        vocabulary = self.vocabulary()
        own = msgspec.structs.replace(self, **self._ids(vocabulary)._asdict())
        texts = filter(None, map(_beginning, samples()))  # which holds no sample while the next is read
        wanted = self.encoder if stored is None or self.encoder != "auto" else stored.get("encoder", "auto")
        encoder, notes = choose_encoder(wanted, vocabulary, texts, planned=stored is not None)
        return msgspec.structs.replace(own, encoder=encoder), notes

    def reopened(self, dependencies: Mapping[str, str], constants: str) -> "TokenRecipe":
        """The recipe of an existing cache, with the tokenizer stored in it if that is intact."""
        own = vocabulary_in(constants)
        is_sound = own is not None and own.sha256 == dependencies.get(TOKENIZER_FILE)
        return msgspec.structs.replace(self, tokenizer=constants) if is_sound else self

    def make(self, samples: Iterable[Sample]) -> Rows:
        vocabulary = self.vocabulary()
        frame = self._frame(vocabulary)
        name = self._encoder()
        most = MAX_UNCUT_BYTES[name] if self.max_uncut_bytes is msgspec.UNSET else self.max_uncut_bytes
        encoder = PiecewiseEncoder(open_encoder(name, vocabulary), vocabulary, most)
        documents = encode_documents(samples, encoder, frame)
        cut = cut_long(documents, self.sequence_length, self.long)
        columns = pack_rows(documents, cut.lengths, self.sequence_length, self._ids(vocabulary).pad)
        statistics = row_statistics(documents.lengths, cut.lengths, columns, documents.characters, self.sequence_length)
        return Rows(columns, in_order([*documents.failed, *cut.failed]), statistics)

    @staticmethod
    def figures(fields: Mapping[str, Any], statistics: Mapping[str, Any], holds: Mapping[str, int]) -> dict[str, Any]:
        """Figures from the sums over all chunks: shares, ratios, bytes per token."""
        return token_figures(fields, statistics, holds)

    @staticmethod
    def metadata(fields: Mapping[str, Any], statistics: Mapping[str, Any], holds: Mapping[str, int]) -> dict[str, Any]:
        """The same figures under the names that hand-made token caches use."""
        figures = token_figures(fields, statistics, holds)
        return {
            "version": "1.0",
            "total_chunks": holds["chunks"],
            "total_sequences": holds["rows"],
            "max_length": fields["sequence_length"],
            "compression_enabled": fields["codec"] != "none",
            "utilization_stats": {
                "avg_utilization": figures["utilization"],
                "total_tokens": statistics.get("tokens", 0),
                "efficiency_ratio": _ratio(statistics.get("tokens", 0), statistics.get("tokens_in", 0)),
            },
        }

    def _frame(self, vocabulary: Vocabulary) -> Frame:
        ids = self._ids(vocabulary)
        begin, end = (-1 if number is None else number for number in (ids.bos, ids.eos))
        return Frame(begin, end, vocabulary.size, DTYPES[self._dtype()][1], vocabulary.control_ids([begin, end]))

    def _ids(self, vocabulary: Vocabulary) -> Ids:
        eos = vocabulary.end_of_document() if self.eos == "auto" else self.eos
        return Ids(
            eos=None if eos is None else vocabulary.id_of(eos, "eos"),
            bos=None if self.bos is None else vocabulary.id_of(self.bos, "bos"),
            pad=vocabulary.padding() if self.pad == "auto" else vocabulary.id_of(self.pad, "pad"),
        )


def _beginning(sample: Sample) -> str:
    return sample.data[:SAMPLE_CHARS] if isinstance(sample.data, str) else ""
