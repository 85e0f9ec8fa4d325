"""Which rows of a cache are in, as rules that hold for every generation: training and validation, and filters.

A rule is data. Applied to a cache (`rule.of(cache)`) it becomes the selection of the rows of the pinned generation:
whole chunks as ranges, single rows as one bit each in a mapped file.
"""

import hashlib
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from forebay.cache.reader import Cache
from forebay.columns import Columns
from forebay.errors import SelectionEmpty
from forebay.order.selection import Bits, ChunkSelection, Selection, packed_bytes
from forebay.order.split import chunk_names, on_training_side, sample_names
from forebay.torch.given import checked_names
from forebay.torch.kept_bits import keep_bits
from forebay.torch.stream import Rule

Chosen = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Split:
    """The training or the validation side of a cache, by a stable hash: no row ever changes sides.

    By chunk, where rows are packed of many documents: no document spans chunks, so none is on both sides. By sample,
    where the recipe names a column of sample ids: a sample is on the same side in every cache. `folder` keeps the bits
    of a split by sample for the next run.
    """

    side: Literal["train", "validation"]
    fraction: float = 0.8
    seed: int = 0
    by: Literal["auto", "chunk", "sample"] = "auto"
    folder: str | None = None

    def __post_init__(self) -> None:
        if self.side not in ("train", "validation"):
            raise ValueError(f"side is {self.side!r}; a split has the sides 'train' and 'validation'")
        if self.by not in ("auto", "chunk", "sample"):
            raise ValueError(
                f"by is {self.by!r}; a split is by 'chunk', by 'sample', or by what the cache has ('auto')"
            )
        on_training_side([], self.fraction, self.seed)  # refuses what is no fraction or seed
        object.__setattr__(self, "fraction", float(self.fraction))  # numbers of numpy have another repr
        object.__setattr__(self, "seed", int(self.seed))

    @property
    def digest(self) -> str:
        return f"{self.side} of {self.fraction!r}, seed {self.seed}, by {self.by}"

    def of(self, cache: Cache) -> Selection:
        """The rows on this side."""
        column = cache.recipe(cache.generation.base).sample_ids
        if self.by == "sample" and not column:
            raise ValueError(f"the recipe of '{cache.root}' names no column of sample ids; split it by chunk")
        by_chunk = self.by == "chunk" or not column
        selection = self._by_chunk(cache) if by_chunk else self._by_sample(cache, column)
        return _checked(selection, cache, self.digest, "another fraction or seed, or smaller chunks in the recipe")

    def _by_chunk(self, cache: Cache) -> Selection:
        return ChunkSelection(cache.chunk_starts, self._chosen(chunk_names(cache.chunk_numbers)))

    def _by_sample(self, cache: Cache, column: str) -> Selection:
        chosen = (self._chosen(sample_names(chunk[column])) for chunk in cache.chunks([column]))
        key = _key(cache, f"{self.digest} of {column}")
        return keep_bits(self.folder, key, len(cache), lambda: _joined(chosen, len(cache)))

    def _chosen(self, names: Iterator[bytes] | Iterator[memoryview]) -> Chosen:
        trained = on_training_side(names, self.fraction, self.seed)
        return trained if self.side == "train" else ~trained


@dataclass(frozen=True, slots=True)
class Where:
    """The rows for which `predicate` is true, of all or of those `within` another rule.

    It is called once per chunk, with the named columns of all its rows, and answers with one truth per row. A
    loader's state knows it by its name, and by a digest of the rows it chose.

        Where("long", lambda columns: columns["length"] >= 40, columns=["length"])
    """

    name: str
    predicate: Callable[[Columns], Chosen]
    columns: Sequence[str]
    within: Rule | None = None
    # What a predicate does may change under its name, so what it chose is known by this object alone.
    _token: str = field(default_factory=lambda: secrets.token_hex(16), init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        checked_names("columns", self.columns)

    @property
    def digest(self) -> str:
        return f"where {self.name}" + (f", within {self.within.digest}" if self.within else "")

    def of(self, cache: Cache) -> Selection:
        """The rows that pass."""
        outer = self.within.of(cache) if self.within else None
        key = _key(cache, f"{self.digest} {self._token}")
        selection = keep_bits(None, key, len(cache), lambda: _joined(self._chosen(cache, outer), len(cache)))
        return _checked(selection, cache, self.digest, "a predicate that some rows pass")

    def _chosen(self, cache: Cache, outer: Selection | None) -> Iterator[Chosen]:
        starts = cache.chunk_starts.tolist()
        for start, stop, columns in zip(starts[:-1], starts[1:], cache.chunks(self.columns), strict=True):
            passed = self._passed(columns)
            if passed.shape != (stop - start,) or passed.dtype != np.bool_:
                raise TypeError(
                    f"the predicate '{self.name}' gave {passed.dtype} of shape {passed.shape} for {stop - start} rows; "
                    "one bool per row is expected"
                )
            yield passed if outer is None else passed & (np.diff(outer.before(np.arange(start, stop + 1))) > 0)

    def _passed(self, columns: Columns) -> Chosen:
        try:
            return np.asarray(self.predicate(columns))
        except Exception as error:
            error.add_note(f"raised by the predicate '{self.name}', which was given the columns {sorted(columns)}")
            raise


def _joined(chosen: Iterator[Chosen], rows: int) -> Bits:
    """The bits of all chunks, which begin and end anywhere in a byte."""
    bits, start = np.zeros(packed_bytes(rows), np.uint8), 0
    for part in chosen:
        packed = np.packbits(np.concatenate([np.zeros(start % 8, np.bool_), part]), bitorder="little")
        bits[start // 8 : start // 8 + len(packed)] |= packed
        start += len(part)
    return bits


def _key(cache: Cache, what: str) -> str:
    generation = cache.generation
    facts = f"{generation.document.cache_id} {generation.number} {cache.content_digest} {cache.layers} {what}"
    return f"{hashlib.blake2b(facts.encode(), digest_size=16).hexdigest()}.safetensors"


def _checked(selection: Selection, cache: Cache, rule: str, choose: str) -> Selection:
    if not len(selection):
        raise SelectionEmpty(cache.root, rule, len(cache), len(cache.chunk_numbers), choose)
    return selection
