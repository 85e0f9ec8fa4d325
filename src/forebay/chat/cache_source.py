"""A chat cache as a source: its conversations are packed again, and neither rendered nor tokenized.

    source, recipe = forebay.chat.repack("caches/sft", sequence_length=8192)
    fb.build("caches/sft-8k", source, recipe)

A sample is a conversation: its tokens and spans, in the order of the samples that the cache was made from. Each chunk
of the cache is a file of the source, read whole and passed on as one batch.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from forebay.chat.conversation_packing import PackedConversations, stored_conversations
from forebay.chat.recipe import ChatRecipe, tokenizer_path
from forebay.errors import SourceInvalid
from forebay.fields import Size
from forebay.format import layout
from forebay.format.generation import ChunkTable
from forebay.masks.train_on import check_roles_and_kinds
from forebay.read.cache import Cache
from forebay.read.opening import open_cache
from forebay.source import Part, PartDigest, Samples, Source, SourceFile, Unit
from forebay.sources.jsonl import lines
from forebay.sources.source_settings import PathSettings

INLINE_BYTES = 256 << 20  # of stored chunks, packed again in about two seconds


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

    def files(self) -> list[SourceFile]:
        """Those of the newest generation, which is pinned from now on: the cache may have grown."""
        _pinned.cache_clear()
        return [file for _, file in self._pinned.chunks.values()]

    def look(self, path: str) -> SourceFile:
        return self._pinned.find(path)[1]

    def looking(self) -> Callable[[str], SourceFile]:
        _pinned.cache_clear()
        return self.look

    def workers(self) -> int | None:
        """None (only the calling process) if packing takes less time than workers need to start."""
        return 0 if sum(file.size for _, file in self._pinned.chunks.values()) < INLINE_BYTES else None

    def weight(self, file: SourceFile) -> int:
        return int(self._pinned.table.statistics["conversations"][self._pinned.find(file.path)[0]])

    def cuts(self, file: SourceFile, start: int, first: int, every: int) -> Iterator[int]:
        """A chunk is one part: the documents of one conversation may lie in several of its rows."""
        return iter([self.weight(file)] if start == 0 else [])

    def read(self, part: Part, *, digest: PartDigest | None = None, preview: bool = False) -> Samples:
        pinned, path = self._pinned, part.file.path
        rows = pinned.cache.chunk(pinned.find(path)[0], ("tokens", "seq_lens", "documents", "spans"))
        check_roles_and_kinds(rows["spans"].values)  # type: ignore[union-attr]  # a chunk has a count for each
        try:
            yield PackedConversations(stored_conversations(rows, path), pinned.signature)
        except ValueError as error:
            raise SourceInvalid(f"'{path}' cannot be packed again: {error}") from error

    def digest(self, file: SourceFile, start: int, stop: int) -> int:
        content = self._pinned.table.digests["content"][self._pinned.find(file.path)[0]]
        return int.from_bytes(content.tobytes()[:8], "little")

    def notes(self, files: Sequence[SourceFile] = ()) -> tuple[str, ...]:
        statistics = self._pinned.table.statistics
        counts = {name: int(statistics[name].sum()) for name in ("documents_cut", "documents_dropped")}
        lost = [f"{counts['documents_cut']:,} cut", f"{counts['documents_dropped']:,} left out"]
        if not any(counts.values()):
            return ()
        return (f"'{self.root}' has {' and '.join(lost)} documents for their length; they stay as they are there",)

    @property
    def _pinned(self) -> "_PinnedCache":
        return _pinned(self.root, os.getpid())


@dataclass(frozen=True)
class _PinnedCache:
    """A cache at the generation that was the newest when it was opened."""

    cache: Cache

    @property
    def table(self) -> ChunkTable:
        return self.cache.generation.table(self.cache.generation.base)

    @cached_property
    def chunks(self) -> dict[str, tuple[int, SourceFile]]:
        """The chunks by their paths, in order, each with its position."""
        folder = self.cache.generation.folder(self.cache.generation.base)
        files = [
            SourceFile(path=record.key(folder), size=record.size, etag=record.content.hex())
            for record in self.table.records()
        ]
        return {file.path: (position, file) for position, file in enumerate(files)}

    def find(self, path: str) -> tuple[int, SourceFile]:
        if path not in self.chunks:
            raise FileNotFoundError(f"'{self.cache.root}' has no chunk '{path}'")
        return self.chunks[path]

    @cached_property
    def signature(self) -> str:
        """The settings that determine tokens and spans."""
        return self.recipe.signature(self._dependencies)

    @property
    def stored_recipe(self) -> ChatRecipe:
        """The recipe, with the tokenizer and the template that the cache contains."""
        return self.recipe.reopened(self._dependencies, tokenizer_path(self.cache.root))

    @property
    def recipe(self) -> ChatRecipe:
        try:
            return msgspec.convert(self.cache.recipe(self.cache.generation.base).fields, ChatRecipe)
        except msgspec.ValidationError as error:
            raise SourceInvalid(f"the recipe of '{self.cache.root}' is not that of a chat cache: {error}") from error

    @property
    def _dependencies(self) -> Mapping[str, str]:
        return self.cache.recipe(self.cache.generation.base).dependencies


@lru_cache(maxsize=4)
def _pinned(root: str, process: int) -> _PinnedCache:
    """The cache at its newest generation, pinned for the process until the files are listed again."""
    cache = open_cache(root)
    if (kind := cache.recipe(cache.generation.base).kind) != ChatRecipe.kind:
        raise SourceInvalid(f"'{root}' is a cache of {kind}; only one of chat can be packed again")
    return _PinnedCache(cache)


def repack(root: str | os.PathLike[str], **fields: Any) -> tuple[ChatCacheSource, ChatRecipe]:
    """Return a chat cache as a source, and its recipe with other fields, such as `sequence_length`.

    Fields that decide tokens or spans cannot be changed: for those, build from the conversations.
    """
    source = ChatCacheSource(os.path.abspath(root))
    _pinned.cache_clear()
    return source, msgspec.structs.replace(source._pinned.stored_recipe, **fields)
