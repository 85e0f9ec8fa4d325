"""The chat recipe: conversations to packed tokens with spans."""

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal

import msgspec
import numpy as np
from msgspec import Meta

from forebay.cache.catalog import read_cache_document, read_recipe_document
from forebay.chat.conversation_packing import (
    Conversations,
    PackedConversations,
    chat_statistics,
    cut_long,
    encoded_conversations,
    joined,
    pack_conversations,
    shown_by_label,
)
from forebay.chat.conversations import (
    BadConversation,
    Conversation,
    FieldNames,
    Format,
    read_conversation,
    without_thinking,
)
from forebay.chat.dissect import Dissector, Document
from forebay.chat.encoding import Encoded, encode_documents
from forebay.chat.layouts import Layouts
from forebay.chat.rendering import open_template
from forebay.chat.template import TEMPLATE, TOKENS, TemplateSource, load_template, template_in
from forebay.chat.token_bytes import TokenBytes, token_bytes
from forebay.columns import DTYPES, Array, Column
from forebay.errors import RecipeInvalid
from forebay.format import layout
from forebay.masks.train_on import GENERATED, KINDS, SPAN_FIELDS
from forebay.recipe import Rows, canonical_json
from forebay.source import BatchedSamples, Failure, Sample, SampleBatch
from forebay.store import open_store
from forebay.tokens.encoders import choose_encoder, encoder_version, open_encoder
from forebay.tokens.packing import in_order
from forebay.tokens.piecewise import MAX_UNCUT_BYTES
from forebay.tokens.recipe import token_figures
from forebay.tokens.recipe_base import ChunkRows, SequenceLength, TokenizedRecipe
from forebay.tokens.vocabulary import CONSTANT, TOKENIZER_FILE, Vocabulary, load_vocabulary, vocabulary_in

_DECIDE_TOKENS = ("template_arguments", "date", "thinking", "stop")
BATCH_BYTES = 1 << 20  # of texts that are encoded together
BATCH_DOCUMENTS = 1024
TEMPLATE_HASH = "chat template"
MOST_SHOWN = 160


class ChatRecipe(TokenizedRecipe, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Pack conversations into rows of tokens, with spans that mark generated tokens.

    `tokenizer` is a folder with `tokenizer.json` and `tokenizer_config.json`, the path of a `tokenizer.json`, or a chat
    cache, which contains both. `template` is a file with another chat template; `template_arguments` are further
    variables of it, such as `{"enable_thinking": False}`. `names` maps fields of samples, such as
    `{"messages": "dialog"}`, and `roles` adds roles, such as `{"teacher": "assistant"}`.
    """

    kind: ClassVar[str] = "chat"
    revision: ClassVar[int] = 1
    numbers_lines: ClassVar[bool] = True
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
    ] = msgspec.field(default_factory=dict)
    date: Annotated[str | None, Meta(description="Date to use as today in templates, such as 2026-01-31.")] = None
    sequence_length: SequenceLength = 2048
    long: Annotated[
        Literal["error", "drop", "truncate"],
        Meta(description="How to treat conversations longer than a row; truncate keeps whole turns."),
    ] = "error"
    format: Annotated[Format, Meta(description="Format of the samples; auto: by their fields.")] = "auto"
    names: Annotated[
        dict[str, str],
        Meta(description="Names of fields in the samples: messages=dialog.", extra={"format": "pairs"}),
    ] = msgspec.field(default_factory=dict)
    roles: Annotated[
        dict[str, Literal["system", "developer", "user", "assistant", "tool"]],
        Meta(description="Further roles: teacher=assistant.", extra={"format": "pairs"}),
    ] = msgspec.field(default_factory=dict)
    thinking: Annotated[
        Literal["keep", "drop"], Meta(description="Whether to keep the reasoning of assistant turns.")
    ] = "keep"
    stop: Annotated[
        str | None, Meta(description="Stop token for a template that writes none after an assistant turn.")
    ] = None
    chunk_rows: ChunkRows = 2000

    def __post_init__(self) -> None:
        super().__post_init__()
        known = [each for each in FieldNames.__dataclass_fields__ if each not in ("format", "thinking", "roles")]
        if unknown := [name for name in self.names if name not in known]:
            raise RecipeInvalid(f"names must map only {', '.join(known)} (got {unknown[0]!r})")

    def columns(self) -> tuple[Column, ...]:
        column = self._column()
        return (
            *super().columns(),
            column(name="spans", dtype="uint32", shape=(SPAN_FIELDS,), ragged=True),
            column(name="last_turn", dtype="uint32", ragged=True),
        )

    def dependencies(self) -> Mapping[str, str]:
        return {TOKENIZER_FILE: self.vocabulary().sha256, TEMPLATE_HASH: self.template_source().sha256}

    def versions(self) -> Mapping[str, str]:
        jinja = encoder_version("jinja2")
        return {**super().versions(), **({"jinja2": jinja} if jinja else {})}

    def constants(self) -> Mapping[str, Array]:
        """The tokenizer and the template, so that a copied cache can be read and continued."""
        source = self.template_source()
        contents = {CONSTANT: self.vocabulary().json, TEMPLATE: source.text.encode(), TOKENS: source.tokens_json}
        return {name: np.frombuffer(content, np.uint8) for name, content in contents.items()}

    def settled(
        self, stored: Mapping[str, Any] | None, samples: Callable[[], Iterable[Sample]]
    ) -> tuple["ChatRecipe", tuple[str, ...]]:
        """The recipe with its encoder and its padding chosen, and notes about the choice."""
        vocabulary = self.vocabulary()
        first = next(iter(samples()), None)
        is_packed = first is not None and isinstance(first.data, PackedConversations)
        if is_packed and self.encoder != "auto":
            return msgspec.structs.replace(self, pad=self._pad(vocabulary)), ()  # nothing is encoded
        self.token_bytes()
        wanted = self.encoder if stored is None or self.encoder != "auto" else stored.get("encoder", "auto")
        rendered = [] if is_packed else self._rendered(enumerate(samples()), [])
        documents = [document for sample in rendered for document in sample.documents]
        texts = [document.text for document in documents]
        encoder, notes = choose_encoder(wanted, vocabulary, texts, planned=stored is not None, control=True)
        encoded = encode_documents(documents, open_encoder(encoder, vocabulary, control=True), self.token_bytes())
        if headers := encoded.headers:
            turns = sum(document.turns for document in documents)
            problem = f"the template writes no generation prompt; {headers:,} header tokens are trained"
            notes = (*notes, f"{problem} in the {turns:,} turns of the trial")
        if not is_packed and self._renderer().layouts.dissector.template.has_generation:
            notes = (*notes, "generation blocks of the template are ignored; all that inference generates is trained")
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

    def make(self, samples: Iterable[Sample]) -> Rows:
        parts: list[Conversations] = []
        failed: list[tuple[int, Failure]] = []
        for batch in in_batches(self._rendered(self._without_packed(samples, parts), failed)):
            parts.append(self._encode(batch, failed))
        conversations = joined(parts, DTYPES[self._dtype()][1])
        cut = cut_long(conversations, self.sequence_length, self.long)
        columns = pack_conversations(conversations, cut, self.sequence_length, self._pad(self.vocabulary()))
        statistics = chat_statistics(conversations, cut, columns, self.sequence_length)
        return Rows(columns, in_order([*failed, *cut.failed]), statistics)

    def vocabulary(self) -> Vocabulary:
        return load_vocabulary(tokenizer_path(self.tokenizer))

    def token_bytes(self) -> TokenBytes:
        """The bytes of every token. Tokens that the tokenizer's configuration names, and `stop`, are control tokens."""
        vocabulary = self.vocabulary()
        if self.stop is not None and self.stop not in vocabulary.ids:
            raise RecipeInvalid(f"stop is {self.stop!r}, which is not a token of '{self.tokenizer}'")
        named = {text for name, text in self.template_source().tokens if name != "unk_token"}
        return token_bytes(vocabulary, frozenset({*named, *([self.stop] if self.stop else [])}))

    def signature(self, dependencies: Mapping[str, str]) -> str:
        """A hash of the settings that determine tokens and spans; recipes with one hash can repack conversations."""
        decides = {name: getattr(self, name) for name in _DECIDE_TOKENS}
        return hashlib.sha256(canonical_json([self.revision, decides, dict(dependencies)])).hexdigest()

    def template_source(self) -> TemplateSource:
        return load_template(tokenizer_path(self.tokenizer), self.template)

    @staticmethod
    def figures(fields: Mapping[str, Any], statistics: Mapping[str, Any], holds: Mapping[str, int]) -> dict[str, Any]:
        """Figures from the sums over all chunks: those of tokens, and shares by role and kind."""
        tokens = max(1, statistics.get("tokens", 0))
        conversations = max(1, statistics.get("conversations", 0))
        by_label = shown_by_label(statistics)
        return {
            **token_figures(fields, statistics, holds),
            **by_label,
            "generated_share": sum(by_label["tokens_by_kind"].get(kind, 0) for kind in GENERATED) / tokens,
            "turns_per_conversation": statistics.get("turns", 0) / conversations,
        }

    def _rendered(
        self, samples: Iterable[tuple[int, Sample]], failed: list[tuple[int, Failure]]
    ) -> Iterator["Rendered"]:
        """The documents of every numbered sample. One that fails is added to `failed`."""
        renderer, smallest = None, min(MAX_UNCUT_BYTES.values())
        for number, sample in samples:
            if isinstance(sample.data, bytes) and not sample.data.strip():
                continue  # an empty line
            renderer = renderer or self._renderer()  # packed conversations need neither a tokenizer nor a template
            try:
                rendered = self._render(number, sample, renderer)
            except BadConversation as error:
                failed.append((number, error.failure(sample.id)))
            except UnicodeEncodeError as error:
                failed.append((number, Failure(sample.id, "not-utf8", f"half of a surrogate pair at {error.start:,}")))
            else:
                if rendered.size > smallest and (problem := self._size_problem(rendered.size)) is not None:
                    failed.append((number, Failure(sample.id, "too-large", problem)))
                    continue
                yield rendered

    def _render(self, number: int, sample: Sample, renderer: "Renderer") -> "Rendered":
        """The documents of a sample; raises `BadConversation`, or `UnicodeEncodeError` for half a surrogate pair."""
        return Rendered(number, sample.id, renderer.layouts.documents(renderer.read(sample.data)))

    def _size_problem(self, size: int) -> str | None:
        """Why documents of `size` bytes are not encoded: that would take some hundred times their size in memory."""
        if size <= (most := MAX_UNCUT_BYTES[self._encoder(control=True)]):
            return None
        return f"it is rendered as {size:,} bytes; at most {most:,} are encoded, so split the conversation"

    def _without_packed(self, samples: Iterable[Sample], parts: list[Conversations]) -> Iterator[tuple[int, Sample]]:
        """The samples to render, with their numbers; those of a chat cache are added to `parts` instead."""
        signature, number = "", 0
        for item in samples.batches() if isinstance(samples, BatchedSamples) else samples:
            packed = item if isinstance(item, SampleBatch) else item.data
            if isinstance(packed, PackedConversations):
                signature = signature or self.signature(self.dependencies())
                _check_signature(packed, signature)
                parts.append(packed.conversations.numbered_from(number))
                number += packed.count
                continue
            for sample in item.samples() if isinstance(item, SampleBatch) else (item,):
                yield number, sample
                number += 1

    def _encode(self, batch: Sequence["Rendered"], failed: list[tuple[int, Failure]]) -> Conversations:
        """The documents of some samples as tokens, without samples that have a problem."""
        encoded, problems = self._encoded(batch)
        failed += [(batch[at].number, Failure(batch[at].name, *problem)) for at, problem in problems.items()]
        usable = [sample for at, sample in enumerate(batch) if at not in problems]
        keep = np.array([at not in problems for at, sample in enumerate(batch) for _ in sample.documents], np.bool_)
        names = [sample.name for sample in usable for _ in sample.documents]
        numbers = np.array([sample.number for sample in usable for _ in sample.documents], np.int64)
        characters = sum([len(document.text) for sample in usable for document in sample.documents])
        return encoded_conversations(encoded, keep, numbers, names, characters)

    def _encoded(self, batch: Sequence["Rendered"]) -> tuple[Encoded, dict[int, tuple[str, str]]]:
        """The documents of some samples, and the samples with a problem."""
        tokens = self.token_bytes()
        documents = [document for sample in batch for document in sample.documents]
        encoder = open_encoder(self._encoder(control=True), self.vocabulary(), control=True)
        encoded = encode_documents(documents, encoder, tokens)
        sample_of = np.repeat(np.arange(len(batch)), [len(sample.documents) for sample in batch])
        problems = {**untrained_documents(sample_of, documents, encoded, tokens), **encoded.problems}
        return encoded, {int(sample_of[at]): problems[at] for at in sorted(problems, reverse=True)}

    def _renderer(self) -> "Renderer":
        arguments, tokens = canonical_json(self.template_arguments), self.token_bytes()
        source = self.template_source()
        layouts = _open_layouts(source, arguments, self.date, tokens.special, self.stop)
        return Renderer(layouts, self._names(), tokens.nfc, self.thinking == "drop")

    def _names(self) -> FieldNames:
        named: dict[str, Any] = dict(self.names)
        return FieldNames(format=self.format, roles=tuple(sorted(self.roles.items())), **named)

    def _pad(self, vocabulary: Vocabulary) -> int:
        if self.pad != "auto":
            return vocabulary.id_of(self.pad, "pad")
        named = dict(self.template_source().tokens).get("pad_token", "")
        return vocabulary.ids[named] if named in vocabulary.ids else vocabulary.padding()


def tokenizer_path(tokenizer: str) -> str:
    """The path of a tokenizer; of a chat cache, that of its constants."""
    if not os.path.isfile(os.path.join(tokenizer, layout.CACHE)):
        return tokenizer
    store = open_store(tokenizer)
    document = read_recipe_document(store, read_cache_document(store).base)
    return (
        tokenizer if document is None else os.path.join(tokenizer, layout.constants(layout.document_folder(document)))
    )


@dataclass(frozen=True, slots=True)
class Renderer:
    """Reader and renderer of all samples of a chunk."""

    layouts: Layouts
    names: FieldNames
    nfc: bool
    drops_thinking: bool

    def read(self, data: Any) -> Conversation:
        conversation = read_conversation(data, self.names, nfc=self.nfc)
        return without_thinking(conversation) if self.drops_thinking else conversation


@dataclass(slots=True)  # one for every sample: frozen ones take twice as long to make
class Rendered:
    """A sample as documents."""

    number: int
    name: str
    documents: list[Document]
    size: int = field(init=False)  # bytes of all documents

    def __post_init__(self) -> None:
        self.size = sum(len(document.raw) for document in self.documents)


def _check_signature(packed: PackedConversations, signature: str) -> None:
    if packed.signature != signature:
        raise RecipeInvalid(
            "the conversations were tokenized by a recipe with another tokenizer, template or treatment of turns",
            hint="take its recipe: source, recipe = forebay.chat.repack(root, sequence_length=…)",
        )


def in_batches(rendered: Iterator[Rendered]) -> Iterator[list[Rendered]]:
    """Samples to encode together: fewer than `BATCH_BYTES` of them, and one more."""
    batch: list[Rendered] = []
    size = 0
    for sample in rendered:
        batch.append(sample)
        size += sample.size
        if size >= BATCH_BYTES or len(batch) >= BATCH_DOCUMENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def untrained_documents(
    sample_of: Array, documents: Sequence[Document], encoded: Encoded, tokens: TokenBytes
) -> dict[int, tuple[str, str]]:
    """Documents of samples without a generated token, and those with a turn that no control token ends."""
    span_document = np.repeat(np.arange(len(documents)), encoded.span_counts)
    kind = encoded.spans[:, 3]
    written = np.bincount(sample_of[span_document[_WRITTEN[kind]]], minlength=len(documents))
    is_stop = kind == KINDS.index("stop")
    last = (np.cumsum(encoded.lengths) - encoded.lengths)[span_document] + encoded.spans[:, 1] - 1
    is_stop[is_stop] = tokens.control[encoded.ids[last[is_stop]]]
    stops = np.bincount(span_document[is_stop], minlength=len(documents))
    problems: dict[int, tuple[str, str]] = {}
    for at in np.flatnonzero(written[sample_of] == 0).tolist():
        problems[at] = "no-response", f"no token is the assistant's: {_shown(documents[at].text)}"
    for at in np.flatnonzero(stops < [document.turns for document in documents]).tolist():
        problems[at] = (
            "no-stop",
            f"the tokenizer does not make one token of a turn's stop token: {_shown(documents[at].text)}",
        )
    return problems


_WRITTEN = np.isin(KINDS, ("response", "thinking", "tool_call"))  # by kind


def _shown(text: str) -> str:
    return repr(text[-MOST_SHOWN:])


@lru_cache(maxsize=4)
def _open_layouts(
    source: TemplateSource, arguments: bytes, date: str | None, special: re.Pattern[str], stop: str | None
) -> Layouts:
    return Layouts(Dissector(open_template(source, arguments, date), special, stop))
