"""A chat cache as a source: its conversations are packed again, and neither rendered nor tokenized.

    source, recipe = forebay.chat.repack("caches/sft", sequence_length=8192)
    fb.build("caches/sft-8k", source, recipe)

A sample is a conversation: its tokens and spans, in the order of the samples that the cache was made from. Each chunk
of the cache is a file of the source, read whole and passed on as one batch.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from typing import Annotated, Any, ClassVar

import msgspec
import numpy as np
from msgspec import Meta

from forebay.chat.conversation_packing import PackedConversations, stored_documents
from forebay.chat.recipe import ChatRecipe, tokenizer_place
from forebay.columns import Array, Ragged
from forebay.errors import SourceInvalid
from forebay.fields import Size
from forebay.format import layout
from forebay.format.generation import ChunkTable
from forebay.masks.train_on import check_roles_and_kinds
from forebay.read.cache import Cache
from forebay.read.opening import open_cache
from forebay.source import Failure, Part, PartDigest, Sample, SampleBatch, Source, SourceFile, Unit
from forebay.sources.jsonl import lines
from forebay.sources.source_settings import PathSettings
from forebay.store import Store, open_store

INLINE_BYTES = 256 << 20  # of stored chunks, packed again in about two seconds
GLANCE = 256  # conversations of a chunk that an estimate is made from
_COLUMNS = ("tokens", "seq_lens", "documents", "spans")


class ChatSettings(PathSettings, frozen=True, kw_only=True):
    """Conversations, or a chat cache to pack again.

    SOURCE is a file, a folder or a quoted glob of JSON lines, each an object with the messages of a conversation; .gz,
    .zst, .bz2 and .xz files are decompressed. A chat cache as SOURCE is packed again, and not tokenized.
    """

    example: ClassVar[str] = "'chats/*.jsonl' --tokenizer ./model"

    max_sample_bytes: Annotated[
        Size | None, Meta(description="Fail longer conversations.", extra={"default": "64MiB"})
    ] = None

    def open(self) -> Source:
        if len(self.paths) == 1 and os.path.isfile(os.path.join(self.paths[0], layout.CACHE)):
            return ChatCacheSource(os.path.abspath(self.paths[0]))
        return lines(*self.paths, **self._passed("max_sample_bytes"))


@dataclass(frozen=True, slots=True)
class ChatCacheSource(Source):
    """The conversations of a chat cache; a sample's id is `chunk file#number of the sample in the chunk`."""

    kind: ClassVar[str] = "chat-cache"
    unit: ClassVar[Unit] = "samples"
    files_grow: ClassVar[bool] = False

    root: str

    def describe(self) -> Mapping[str, Any]:
        return {"kind": self.kind, "root": self.root}

    @classmethod
    def from_description(cls, description: Mapping[str, Any]) -> "ChatCacheSource":
        return cls(str(description["root"]))

    def files(self) -> list[SourceFile]:
        """Those of the newest generation, which is pinned from now on: the cache may have grown."""
        _repin(self.root)
        return [file for _, file in self._files().values()]

    def look(self, path: str) -> SourceFile:
        return self._find(path)[1]

    def looking(self) -> Callable[[str], SourceFile]:
        _repin(self.root)
        return self.look

    def workers(self) -> int | None:
        """None (only the calling process) if packing takes less time than workers need to start."""
        return 0 if sum(file.size for _, file in self._files().values()) < INLINE_BYTES else None

    def weight(self, file: SourceFile) -> int:
        table = self._table()
        return int(table.statistics["conversations"][self._position(file)])

    def cuts(self, file: SourceFile, start: int, first: int, every: int) -> Iterator[int]:
        """A chunk is one part: the documents of one conversation may lie in several of its rows."""
        return iter([self.weight(file)] if start == 0 else [])

    def scanned(self, file: SourceFile) -> SourceFile:
        return file

    def read(
        self, part: Part, *, digest: PartDigest | None = None, preview: bool = False
    ) -> Iterable[Sample | Failure | SampleBatch]:
        """The conversations of a part; for a preview those of the first rows, as all would take as long as packing."""
        if not preview:
            yield self._packed(part)
            return
        cache, at = self._cache(), self._position(part.file)
        count = ceil(self._table().rows[at] * min(1, GLANCE / max(1, part.weight)))
        rows = cache.read(np.arange(count) + cache.chunk_starts[at], _COLUMNS)
        yield self._conversations(rows, part)

    def _packed(self, part: Part) -> PackedConversations:
        return self._conversations(self._cache().chunk(self._position(part.file), _COLUMNS), part)

    def _conversations(self, rows: Mapping[str, Array | Ragged], part: Part) -> PackedConversations:
        return _conversations(rows, part.file.path, _signature(self.root, os.getpid()))

    def digest(self, file: SourceFile, start: int, stop: int) -> int:
        return int.from_bytes(self._table().digests["content"][self._position(file)].tobytes()[:8], "little")

    def notes(self, files: Sequence[SourceFile] = ()) -> tuple[str, ...]:
        counts = {name: int(self._table().statistics[name].sum()) for name in ("documents_cut", "documents_dropped")}
        lost = [f"{counts['documents_cut']:,} cut", f"{counts['documents_dropped']:,} left out"]
        if not any(counts.values()):
            return ()
        return (f"'{self.root}' has {' and '.join(lost)} documents for their length; they stay as they are there",)

    def _files(self) -> dict[str, tuple[int, SourceFile]]:
        return _chunks(self.root, os.getpid())

    def _find(self, path: str) -> tuple[int, SourceFile]:
        try:
            return self._files()[path]
        except KeyError:
            raise FileNotFoundError(f"'{self.root}' has no chunk '{path}'") from None

    def _position(self, file: SourceFile) -> int:
        return self._find(file.path)[0]

    def _table(self) -> ChunkTable:
        cache = self._cache()
        return cache.generation.table(cache.generation.base)

    def _cache(self) -> Cache:
        return _opened(self.root, os.getpid())


@lru_cache(maxsize=4)
def _pinned(root: str, process: int) -> tuple[Cache, tuple[str, str]]:
    """The cache at its newest generation, pinned for the process until `_repin`, and what was the newest before."""
    newest = _newest(open_store(root))
    cache = open_cache(root)
    if (kind := cache.recipe(cache.generation.base).kind) != ChatRecipe.kind:
        raise SourceInvalid(f"'{root}' is a cache of {kind}; only one of chat can be packed again")
    return cache, newest


def _opened(root: str, process: int) -> Cache:
    return _pinned(root, process)[0]


@lru_cache(maxsize=4)
def _chunks(root: str, process: int) -> dict[str, tuple[int, SourceFile]]:
    """The chunks of the pinned generation by their paths, in order, each with its position."""
    generation = _opened(root, process).generation
    chunks = {}
    for position, record in enumerate(generation.table(generation.base).records()):
        path = record.key(generation.folder(generation.base))
        chunks[path] = position, SourceFile(path=path, size=record.size, etag=record.content.hex())
    return chunks


def _repin(root: str) -> None:
    """Open a cache anew when it is needed next, if something was published there since."""
    cache, newest = _pinned(root, os.getpid())
    if newest != _newest(cache.store):
        for pinned in (_pinned, _chunks, _signature):
            pinned.cache_clear()


def _newest(store: Store) -> tuple[str, str]:
    """The file of the newest generation; another cache in the same place has another one of that name."""
    return max(((entry.key, entry.etag) for entry in store.entries(layout.GENERATIONS)), default=("", ""))


def repack(root: str | os.PathLike[str], **fields: Any) -> tuple[ChatCacheSource, ChatRecipe]:
    """Return a chat cache as a source, and its recipe with other fields, such as `sequence_length`.

    Fields that decide tokens or spans cannot be changed: for those, build from the conversations.
    """
    source = ChatCacheSource(os.path.abspath(root))
    _repin(source.root)
    recipe = kept_recipe(_opened(source.root, os.getpid()))
    return source, msgspec.structs.replace(recipe, **fields)


def kept_recipe(cache: Cache) -> ChatRecipe:
    """The recipe of a cache, with the tokenizer and the template that it contains."""
    dependencies = cache.recipe(cache.generation.base).dependencies
    return _recipe_of(cache).reopened(dependencies, tokenizer_place(cache.root))


@lru_cache(maxsize=4)
def _signature(root: str, process: int) -> str:
    """What decided the tokens and spans of a cache."""
    cache = _opened(root, process)
    return _recipe_of(cache).signature(cache.recipe(cache.generation.base).dependencies)


def _recipe_of(cache: Cache) -> ChatRecipe:
    try:
        return msgspec.convert(cache.recipe(cache.generation.base).fields, ChatRecipe)
    except msgspec.ValidationError as error:
        raise SourceInvalid(f"the recipe of '{cache.root}' is not that of a chat cache: {error}") from error


def _conversations(rows: Mapping[str, Array | Ragged], path: str, made_by: str) -> PackedConversations:
    """The conversations of a chunk in the order of their numbers, each with its documents in order."""
    tokens, lengths, documents, spans = (rows[name] for name in _COLUMNS)
    assert not isinstance(tokens, Ragged)
    assert isinstance(lengths, Ragged)
    assert isinstance(documents, Ragged)
    assert isinstance(spans, Ragged)
    check_roles_and_kinds(spans.values)  # a chunk's statistics have a count for each, whatever its number
    width = tokens.shape[1]
    try:
        located = stored_documents(lengths, documents, width)
        places, counts = located.spans(spans, width)
    except ValueError as error:
        raise SourceInvalid(f"'{path}' cannot be packed again: {error}") from error
    order = located.order
    return PackedConversations(
        path,
        tokens.reshape(-1),
        (located.row * width + located.starts)[order],
        located.lengths[order],
        places,
        counts,
        documents.values[order, 0].astype(np.int64),
        made_by,
    )
