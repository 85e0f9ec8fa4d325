"""The chat recipe: conversations to packed tokens with spans."""

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import compress
from typing import Annotated, Any, ClassVar, Literal

import msgspec
import numpy as np
from msgspec import Meta

from forebay.chat.conversation_packing import (
    Gathered,
    PackedConversations,
    chat_statistics,
    cut_long,
    pack_conversations,
)
from forebay.chat.conversations import (
    BadConversation,
    FieldNames,
    Format,
    plain_messages,
    read_conversation,
    read_record,
    without_thinking,
)
from forebay.chat.encoding import (
    Encoded,
    TokenBytes,
    choose_chat_encoder,
    encode_documents,
    open_chat_encoder,
    token_bytes,
)
from forebay.chat.layouts import Document, Layouts
from forebay.chat.template import TEMPLATE, TOKENS, TemplateSource, load_template, open_template, template_in
from forebay.columns import DTYPES, Array, CodecField, Column, Dtype, LevelField
from forebay.errors import RecipeInvalid
from forebay.format import layout
from forebay.masks.train_on import GENERATED, KINDS, ROLES, SPAN_FIELDS
from forebay.recipe import ChunkTarget, RecipeHooks, RecipeMeta, Rows, canonical_json, check_fields
from forebay.source import BatchedSamples, Failure, Sample, SampleBatch
from forebay.tokens.packing import MAX_UNCUT_BYTES
from forebay.tokens.recipe import BLOCK_TOKENS, MOST_TOKENS, check_token_ids, text_identity, token_figures
from forebay.tokens.vocabulary import (
    CONSTANT,
    ENCODERS,
    TOKENIZER_FILE,
    EncoderName,
    Vocabulary,
    encoder_version,
    is_on_hub,
    load_vocabulary,
    vocabulary_in,
)

_DECIDE_TOKENS = ("template_arguments", "date", "thinking", "history", "generation", "stop")
BATCH_BYTES = 1 << 20  # of texts that are encoded together
BATCH_DOCUMENTS = 1024
TEMPLATE_HASH = "chat template"
MOST_SHOWN = 160
MOST_CACHE_BYTES = 1 << 20


class ChatRecipe(
    RecipeHooks, msgspec.Struct, metaclass=RecipeMeta, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """Pack conversations into rows of tokens, with spans that say what a model generates.

    `tokenizer` is a folder with `tokenizer.json` and `tokenizer_config.json`, the path of a `tokenizer.json`, or a chat
    cache, which contains both. `template` is a file with another chat template; `template_arguments` are further
    variables of it, such as `{"enable_thinking": False}`. `names` maps fields of samples, such as
    `{"messages": "dialog"}`, and `roles` adds roles, such as `{"teacher": "assistant"}`.
    """

    kind: ClassVar[str] = "chat"
    revision: ClassVar[int] = 1
    located: ClassVar[tuple[str, ...]] = ("tokenizer", "template")  # the fingerprint has the hashes instead
    source_settings: ClassVar[str] = "forebay.chat.cache_source:ChatSettings"

    tokenizer: Annotated[
        str,
        Meta(
            description="Folder with tokenizer.json and tokenizer_config.json, a tokenizer.json, or a chat cache.",
            extra={"format": "file", "metavar": "TOKENIZER"},
        ),
    ]
    template: Annotated[
        str,
        Meta(
            description="File with the chat template.",
            extra={"format": "file", "metavar": "FILE", "default": "that of the tokenizer"},
        ),
    ] = ""
    template_arguments: Annotated[
        dict[str, Any],
        Meta(description="Further variables of the template: enable_thinking=false.", extra={"format": "values"}),
    ] = {}
    date: Annotated[str | None, Meta(description="Date to use as today in templates, such as 2026-01-31.")] = None
    sequence_length: Annotated[int, Meta(ge=1, le=MOST_TOKENS, description="Tokens per row.")] = 2048
    long: Annotated[
        Literal["error", "drop", "truncate"],
        Meta(description="How to treat conversations longer than a row; truncate keeps whole turns."),
    ] = "error"
    format: Annotated[Format, Meta(description="Format of the samples; auto: by their fields.")] = "auto"
    names: Annotated[
        dict[str, str],
        Meta(description="Names of fields in the samples: messages=dialog.", extra={"format": "pairs"}),
    ] = {}
    roles: Annotated[
        dict[str, Literal["system", "developer", "user", "assistant", "tool"]],
        Meta(description="Further roles: teacher=assistant.", extra={"format": "pairs"}),
    ] = {}
    thinking: Annotated[
        Literal["keep", "drop"], Meta(description="Whether to keep the reasoning of assistant turns.")
    ] = "keep"
    history: Annotated[
        Literal["split", "error"],
        Meta(description="How to treat conversations whose earlier turns the template rewrites."),
    ] = "split"
    generation: Annotated[
        Literal["check", "ignore"], Meta(description="Whether generation blocks of the template must match.")
    ] = "check"
    stop: Annotated[
        str | None, Meta(description="Stop token for a template that writes none after an assistant turn.")
    ] = None
    chunk_size: Annotated[int, Meta(ge=1, description="Rows per chunk.")] = 2000
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
        Literal["auto", "fastokens", "tokenizers"],
        Meta(description="Tokenizer backend; auto uses fastokens if it matches the reference."),
    ] = "auto"

    def __post_init__(self) -> None:
        check_fields(self)
        check_token_ids(pad=self.pad)
        known = [each for each in FieldNames.__dataclass_fields__ if each not in ("format", "thinking", "roles")]
        if unknown := [name for name in self.names if name not in known]:
            raise RecipeInvalid(f"names must map only {', '.join(known)} (got {unknown[0]!r})")

    def columns(self) -> tuple[Column, ...]:
        rest = partial(Column, codec=self.codec, level=self.level, rows_per_block=self._rows_per_block())
        return (
            rest(name="tokens", dtype=self._dtype(), shape=(self.sequence_length,)),
            rest(name="seq_lens", dtype="uint32", ragged=True),
            rest(name="documents", dtype="uint32", shape=(2,), ragged=True),
            rest(name="spans", dtype="uint32", shape=(SPAN_FIELDS,), ragged=True),
            rest(name="last_turn", dtype="uint32", ragged=True),
        )

    def chunk_target(self) -> ChunkTarget:
        return ChunkTarget(rows=self.chunk_size)

    def dependencies(self) -> Mapping[str, str]:
        return {TOKENIZER_FILE: self.vocabulary().sha256, TEMPLATE_HASH: self.template_source().sha256}

    def versions(self) -> Mapping[str, str]:
        return {name: version for name in (*ENCODERS, "jinja2") if (version := encoder_version(name))}

    def constants(self) -> Mapping[str, Array]:
        """The tokenizer and the template, so that a copied cache can be read and continued."""
        source = self.template_source()
        kept = {CONSTANT: self.vocabulary().json, TEMPLATE: source.text.encode(), TOKENS: source.tokens_json}
        return {name: np.frombuffer(content, np.uint8) for name, content in kept.items()}

    @property
    def identity(self) -> Callable[[Sample], bytes | None] | None:
        """With `deduplicate`, samples with the same bytes are duplicates."""
        return text_identity if self.deduplicate else None

    def settled(
        self, kept: Mapping[str, Any] | None, samples: Callable[[], Iterable[Sample]]
    ) -> tuple["ChatRecipe", tuple[str, ...]]:
        """The recipe with its encoder and its padding chosen, and notes about the choice."""
        vocabulary = self.vocabulary()
        first = next(iter(samples()), None)
        if self.encoder != "auto" and first is not None and isinstance(first.data, PackedConversations):
            return msgspec.structs.replace(self, pad=self._pad(vocabulary)), ()  # nothing is encoded
        self.token_bytes()
        wanted = self.encoder if kept is None or self.encoder != "auto" else kept.get("encoder", "auto")
        texts = [document.text for each in self._rendered(samples(), []) for document in each.documents]
        encoder, notes = choose_chat_encoder(wanted, vocabulary, texts)
        return msgspec.structs.replace(self, encoder=encoder, pad=self._pad(vocabulary)), notes

    def reopened(self, dependencies: Mapping[str, str], constants: str) -> "ChatRecipe":
        """The recipe of an existing cache, with the tokenizer and the template stored in it if they are intact."""
        vocabulary, source = vocabulary_in(constants), template_in(constants)
        is_sound = (
            vocabulary is not None
            and source is not None
            and vocabulary.sha256 == dependencies.get(TOKENIZER_FILE)
            and source.sha256 == dependencies.get(TEMPLATE_HASH)
        )
        return msgspec.structs.replace(self, tokenizer=constants, template=constants) if is_sound else self

    def on_hub(self) -> tuple[str, ...]:
        """The tokenizer, if it would be downloaded."""
        return (self.tokenizer,) if is_on_hub(self.tokenizer) else ()

    def preload(self) -> None:
        self.token_bytes()

    def rows_from(self, statistics: Mapping[str, Any]) -> float:
        """In a large chunk nearly every row is full."""
        tokens: int = statistics["tokens"]
        return tokens / self.sequence_length

    def make(self, samples: Iterable[Sample]) -> Rows:
        gathered = Gathered(DTYPES[self._dtype()][1])
        failed: list[tuple[int, Failure]] = []
        for batch in in_batches(self._rendered(samples, failed, gathered)):
            self._encode(batch, gathered, failed)
        made = gathered.all()
        cut = cut_long(made, self.sequence_length, self.long)
        columns = pack_conversations(made, cut, self.sequence_length, self._pad(self.vocabulary()))
        failures = [failure for _, failure in sorted([*failed, *cut.failed], key=lambda each: each[0])]
        return Rows(columns, tuple(failures), chat_statistics(made, cut, columns, self.sequence_length))

    def vocabulary(self) -> Vocabulary:
        return load_vocabulary(tokenizer_place(self.tokenizer))

    def token_bytes(self) -> TokenBytes:
        """The bytes of every token. Tokens that the tokenizer's configuration names, and `stop`, are control tokens."""
        vocabulary = self.vocabulary()
        if self.stop is not None and self.stop not in vocabulary.ids:
            raise RecipeInvalid(f"stop is {self.stop!r}, which is not a token of '{self.tokenizer}'")
        named = {text for name, text in self.template_source().tokens if name != "unk_token"}
        return token_bytes(vocabulary, frozenset({*named, *([self.stop] if self.stop else [])}))

    def signature(self, dependencies: Mapping[str, str]) -> str:
        """A hash of all that decides tokens and spans: conversations can be packed again by recipes that share it."""
        decides = {name: getattr(self, name) for name in _DECIDE_TOKENS}
        return hashlib.sha256(canonical_json([self.revision, decides, dict(dependencies)])).hexdigest()

    def template_source(self) -> TemplateSource:
        return load_template(tokenizer_place(self.tokenizer), self.template)

    @staticmethod
    def figures(fields: Mapping[str, Any], statistics: Mapping[str, Any], holds: Mapping[str, int]) -> dict[str, Any]:
        """Figures from the sums over all chunks: those of tokens, and shares by role and kind."""
        tokens = max(1, statistics.get("tokens", 0))
        conversations = max(1, statistics.get("conversations", 0))
        kinds = dict(zip(KINDS, statistics.get("tokens_by_kind", []), strict=False))
        return {
            **token_figures(fields, statistics, holds),
            "tokens_by_role": dict(zip(ROLES, statistics.get("tokens_by_role", []), strict=False)),
            "tokens_by_kind": kinds,
            "generated_share": sum(kinds.get(kind, 0) for kind in GENERATED) / tokens,
            "turns_per_conversation": statistics.get("turns", 0) / conversations,
        }

    def _rendered(
        self, samples: Iterable[Sample], failed: list[tuple[int, Failure]], gathered: Gathered | None = None
    ) -> Iterator["Rendered"]:
        """The documents of every sample. One that fails is added to `failed`, one of a cache to `gathered`."""
        names, layouts, tokens, smallest = self._names(), None, None, min(MAX_UNCUT_BYTES.values())
        roles = names.known_roles()
        for number, sample in self._not_packed(samples, gathered):
            if isinstance(sample.data, bytes) and not sample.data.strip():
                continue  # an empty line
            if layouts is None or tokens is None:  # packed conversations need neither a tokenizer nor a template
                tokens = self.token_bytes()
                layouts = self._layouts(tokens)
            try:
                record = read_record(sample.data)
                plain = plain_messages(record, names, roles, nfc=tokens.nfc)
                documents = None if plain is None else layouts.plain_documents(*plain, number)
                if documents is None:
                    conversation = read_conversation(record, names, nfc=tokens.nfc)
                    if self.thinking == "drop":
                        conversation = without_thinking(conversation)
                    documents = layouts.documents(conversation, number)
            except BadConversation as error:
                failed.append((number, error.failure(sample.id)))
            except UnicodeEncodeError as error:
                failed.append((number, Failure(sample.id, "not-utf8", f"half of a surrogate pair at {error.start:,}")))
            else:
                size = 0
                for document in documents:
                    size += len(document.raw)
                if size > smallest and (problem := size_problem(size, self._encoder())) is not None:
                    failed.append((number, Failure(sample.id, "too-large", problem)))
                    continue
                yield Rendered(number, sample.id, documents, size)

    def _not_packed(self, samples: Iterable[Sample], gathered: Gathered | None) -> Iterator[tuple[int, Sample]]:
        """The samples to render, with their numbers; those of a cache are added to `gathered` instead."""
        made_by, number = "", 0
        for given in samples.batches() if isinstance(samples, BatchedSamples) else samples:
            packed = given if isinstance(given, SampleBatch) else given.data
            if isinstance(packed, PackedConversations):
                if gathered is None:  # all samples of a cache are like that, and none is rendered
                    return
                made_by = made_by or self.signature(self.dependencies())
                _check_signature(packed, made_by)
                gathered.add_packed(packed, number)
                number += packed.count
                continue
            for sample in given.samples() if isinstance(given, SampleBatch) else (given,):
                yield number, sample
                number += 1

    def _encode(self, batch: Sequence["Rendered"], gathered: Gathered, failed: list[tuple[int, Failure]]) -> None:
        """Encode the documents of some samples, and leave out the samples with a problem."""
        tokens = self.token_bytes()
        documents = [document for sample in batch for document in sample.documents]
        encoded = encode_documents(documents, open_chat_encoder(self._encoder(), self.vocabulary()), tokens)
        problems = {**untrained_documents(batch, documents, encoded, tokens), **encoded.problems}
        kept = [True] * len(documents)
        first = 0
        for sample in batch if problems else ():
            here = range(first, first := first + len(sample.documents))
            problem = next((problems[at] for at in here if at in problems), None)
            if problem is not None:
                kept[here.start : here.stop] = [False] * len(here)
                failed.append((sample.number, Failure(sample.name, *problem)))
        gathered.characters += sum(len(document.text) for document in compress(documents, kept))
        numbers = [sample.number for sample in batch for _ in sample.documents]
        gathered.add(encoded, kept, numbers, [sample.name for sample in batch for _ in sample.documents])

    def _layouts(self, tokens: TokenBytes) -> Layouts:
        key = canonical_json(self.template_arguments)
        return _open_layouts(
            self.template_source(), key, self.date, tokens.special, self.stop, self.history, self.generation
        )

    def _names(self) -> FieldNames:
        named: dict[str, Any] = dict(self.names)
        return FieldNames(format=self.format, roles=tuple(sorted(self.roles.items())), **named)

    def _pad(self, vocabulary: Vocabulary) -> int:
        if self.pad != "auto":
            return vocabulary.id_of(self.pad, "pad")
        named = dict(self.template_source().tokens).get("pad_token", "")
        return vocabulary.ids[named] if named in vocabulary.ids else vocabulary.padding()

    def _rows_per_block(self) -> int:
        """Rows per block: large blocks compress better; without a codec, blocks are only units of checking."""
        automatic = 0 if self.codec == "none" else max(1, BLOCK_TOKENS // self.sequence_length)
        return self.rows_per_block or automatic

    def _dtype(self) -> Dtype:
        return "uint16" if self.vocabulary().size <= 1 << 16 else "uint32"

    def _encoder(self) -> EncoderName:
        return choose_chat_encoder("auto", self.vocabulary(), ())[0] if self.encoder == "auto" else self.encoder


def tokenizer_place(tokenizer: str) -> str:
    """Where the tokenizer is: of a chat cache, the file of its constants."""
    try:
        with open(os.path.join(tokenizer, layout.CACHE), "rb") as file:
            base = msgspec.json.decode(file.read(MOST_CACHE_BYTES), type=_CacheBase).base
    except (OSError, msgspec.DecodeError):
        return tokenizer
    return os.path.join(tokenizer, layout.constants(base))


class _CacheBase(msgspec.Struct):
    base: str


@dataclass(slots=True)  # one for every sample: frozen ones take twice as long to make
class Rendered:
    """A sample as documents."""

    number: int
    name: str
    documents: list[Document]
    size: int  # bytes of all documents


def _check_signature(packed: PackedConversations, made_by: str) -> None:
    if packed.made_by != made_by:
        raise RecipeInvalid(
            "the conversations were tokenized by a recipe with another tokenizer, template or treatment of turns; "
            "take its recipe: source, recipe = forebay.chat.repack(root, sequence_length=…)"
        )


def size_problem(size: int, encoder: EncoderName) -> str | None:
    """Why documents of `size` bytes are not encoded: that would take some hundred times their size in memory."""
    if size <= (most := MAX_UNCUT_BYTES[encoder]):
        return None
    return f"it is rendered as {size:,} bytes; at most {most:,} are encoded, so split the conversation"


def in_batches(rendered: Iterator[Rendered]) -> Iterator[list[Rendered]]:
    """Samples to encode together: at most `2 * BATCH_BYTES` of them, or one that has more."""
    batch: list[Rendered] = []
    size = 0
    for sample in rendered:
        if batch and size + sample.size > 2 * BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(sample)
        size += sample.size
        if size >= BATCH_BYTES or len(batch) >= BATCH_DOCUMENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def untrained_documents(
    batch: Sequence[Rendered], documents: Sequence[Document], encoded: Encoded, tokens: TokenBytes
) -> dict[int, tuple[str, str]]:
    """Documents without a generated token, and those with a turn that no control token ends."""
    sample_of = np.repeat(np.arange(len(batch)), [len(sample.documents) for sample in batch])
    span_document = np.repeat(np.arange(len(documents)), encoded.span_counts)
    kind = encoded.spans[:, 3]
    written = np.bincount(sample_of[span_document[_WRITTEN[kind]]], minlength=len(batch))
    is_stop = kind == KINDS.index("stop")
    last = (np.cumsum(encoded.lengths) - encoded.lengths)[span_document] + encoded.spans[:, 1] - 1
    is_stop[is_stop] = tokens.control[encoded.ids[last[is_stop]]]
    stops = np.bincount(span_document[is_stop], minlength=len(documents))
    found: dict[int, tuple[str, str]] = {}
    for sample in np.flatnonzero(written == 0).tolist():
        shown = _shown(batch[sample].documents[-1].text)
        found[int(np.searchsorted(sample_of, sample))] = "no-response", f"no token is the assistant's: {shown}"
    for at in np.flatnonzero(stops < [document.turns for document in documents]).tolist():
        found[at] = (
            "no-stop",
            f"the tokenizer does not make one token of a turn's stop token: {_shown(documents[at].text)}",
        )
    return found


_WRITTEN = np.isin(KINDS, ("response", "thinking", "tool_call"))  # by kind


def _shown(text: str) -> str:
    return repr(text[-MOST_SHOWN:])


@lru_cache(maxsize=4)
def _open_layouts(
    source: TemplateSource,
    arguments: bytes,
    date: str | None,
    special: re.Pattern[str],
    stop: str | None,
    history: str,
    generation: str,
) -> Layouts:
    template = open_template(source, arguments, date)
    return Layouts(template, special, stop, history == "split", generation == "check")
