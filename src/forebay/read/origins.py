"""The origin of a row, and its text."""

from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from forebay.cache.plan import load_plan
from forebay.errors import ModelUnusable
from forebay.source import Part

if TYPE_CHECKING:
    from forebay.read.cache import Cache


@dataclass(frozen=True, slots=True)
class RowId:
    """The permanent name of a row."""

    chunk: int
    row: int


@dataclass(frozen=True, slots=True, repr=False)
class Origin:
    """The origin of a row: its position in the cache, the id of its sample, and parts of source files."""

    chunk: int
    row: int
    sample: str  # empty where the cache keeps no ids
    parts: tuple[Part, ...]

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(part.file.path for part in self.parts))

    def __repr__(self) -> str:
        """The ranges of files, without their times, inodes and digests."""
        ranges = ", ".join(f"{part.file.path}[{part.start}:{part.stop}]" for part in self.parts)
        return f"Origin(chunk={self.chunk}, row={self.row}, sample={self.sample!r}, parts=({ranges}))"


def row_origin(cache: "Cache", row: int) -> Origin:
    (name,), column = cache.row_ids([row]), cache.recipe(cache.generation.base).sample_ids
    sample = cache.read([row], [column])[column][0].tobytes().decode(errors="surrogateescape") if column else ""
    parts = load_plan(cache.store).first(len(cache.generation.plan)).parts(name.chunk)
    own = [part for part in parts if part.file.path in (sample, sample.rpartition("@")[0])]
    return Origin(name.chunk, name.row, sample, tuple(own or parts))


def row_text(cache: "Cache", row: int) -> list[str]:
    kind = cache.recipe(cache.generation.base).kind
    if kind not in ("tokens", "chat"):
        raise TypeError(f"'{cache.root}' holds {kind}, not tokens; read the row itself: cache[{row}]")
    columns = cache.read([row], ["tokens", "seq_lens"])
    tokens, stops = columns["tokens"][0], np.cumsum(columns["seq_lens"][0], dtype=np.int64).tolist()
    tokens_package = import_module("forebay.tokens")  # takes long to import, and nothing else here needs it
    vocabulary = tokens_package.Vocabulary(*kept_tokenizer(cache))
    return [tokens_package.decode(vocabulary, tokens[start:stop]) for start, stop in pairwise([0, *stops])]


def kept_tokenizer(cache: "Cache") -> tuple[str, bytes]:
    layer = cache.generation.base
    name, content = cache.recipe(layer).fields.get("tokenizer"), cache.constants(layer).get("tokenizer")
    if name is None or content is None:
        raise ModelUnusable(
            f"the tokenizer '{cache.root}' cannot be used: the cache keeps no tokenizer",
            hint="read its rows as numbers",
        )
    return str(name), content.tobytes()
