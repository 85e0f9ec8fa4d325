"""Rules that select rows of a cache: `Split` into training and validation, `Where` with a predicate, `Present`.

`rule.select(cache)` returns the selected rows of the generation that the cache pins: one bit per row.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from forebay.cache.catalog import presence_name
from forebay.columns import Columns, Ragged
from forebay.errors import NotFound, choice_error
from forebay.feeding.stream import SelectionRule, checked_names
from forebay.fields import checked_whole
from forebay.order.selected_rows import (
    Selection,
    chunk_names,
    document_groups,
    groups_on_training_side,
    on_training_side,
    sample_names,
)
from forebay.read.cache import Cache

Chosen = NDArray[np.bool_]
By = Literal["auto", "chunk", "document", "sample"]
DOCUMENTS = "documents"  # the column with the documents of its chunk that a row holds
CUT_CHUNKS = 64  # a split by document cuts chunks below this number between rows, however far the cache grows
FAR_FROM_FRACTION = 0.05
_MOST_RECENT = 16
_recent: dict[tuple[object, ...], Selection] = {}  # selections that were made last, in this process


@dataclass(frozen=True, slots=True)
class Split:
    """The training or the validation side of a cache, by a stable hash: no row ever changes sides.

    document  packed rows that record their documents: no document is on both sides. The first 64 chunks are split
              between rows, so that a small cache reaches the fraction; later chunks are on one side as a whole
    chunk     packed rows that do not record their documents: whole chunks, which no document spans
    sample    recipes that name a column of sample ids: a sample is on the same side in every cache

    `by="auto"` takes what the cache has. Copies of a document count as different documents: deduplicate, or one copy
    may be on each side. A share of the rows that is more than 5 points off the fraction gives a warning.
    """

    side: Literal["train", "validation"]
    fraction: float = 0.8
    seed: int = 0
    by: By = "auto"

    def __post_init__(self) -> None:
        if self.side not in ("train", "validation"):
            raise choice_error("side", self.side, ("train", "validation"))
        if self.by not in get_args(By):
            raise choice_error("by", self.by, get_args(By))
        on_training_side([], self.fraction, self.seed)  # checks fraction and seed
        object.__setattr__(self, "fraction", float(self.fraction))  # numpy numbers have another repr
        object.__setattr__(self, "seed", checked_whole("seed", self.seed))

    @classmethod
    def pair(cls, fraction: float = 0.8, *, seed: int = 0, by: By = "auto") -> tuple["Split", "Split"]:
        """Return the training and the validation side of one split, which cannot overlap."""
        return cls("train", fraction, seed, by), cls("validation", fraction, seed, by)

    @property
    def digest(self) -> str:
        return f"{self.side} of {self.fraction!r}, seed {self.seed}, by {self.by}"

    def select(self, cache: Cache) -> Selection:
        """Return the rows on this side."""
        advice = "another fraction or seed, by='document' or 'sample' where the cache allows, or smaller chunks"
        selection = _not_empty(self._selected(cache), cache, self, advice)
        self._warn_far_from_fraction(cache, len(selection))
        return selection

    def share(self, cache: Cache) -> float:
        """Return the share of a cache's rows that is on this side, from 0 to 1."""
        return len(self._selected(cache)) / max(1, len(cache))

    def _selected(self, cache: Cache) -> Selection:
        by = self._chosen_by(cache)
        choose = {"chunk": self._by_chunk, "document": self._by_document, "sample": self._by_sample}[by]
        return _selected(cache, self, choose)

    def _chosen_by(self, cache: Cache) -> By:
        has_samples = bool(cache.recipe(cache.generation.base).sample_ids)
        has_documents = DOCUMENTS in cache.columns and cache.column(DOCUMENTS).ragged
        if self.by == "sample" and not has_samples:
            raise ValueError(f"the recipe of '{cache.root}' names no column of sample ids; split it by chunk")
        if self.by == "document" and not has_documents:
            raise ValueError(f"'{cache.root}' has no column '{DOCUMENTS}'; split it by chunk or by sample")
        if self.by != "auto":
            return self.by
        return "sample" if has_samples else "document" if has_documents else "chunk"

    def _by_chunk(self, cache: Cache) -> Iterator[Chosen]:
        sides = self._chosen(chunk_names(cache.chunk_numbers)).tolist()
        return (np.full(rows, side) for rows, side in zip(np.diff(cache.chunk_starts).tolist(), sides, strict=True))

    def _by_sample(self, cache: Cache) -> Iterator[Chosen]:
        column = cache.recipe(cache.generation.base).sample_ids
        return (self._chosen(sample_names(chunk[column])) for chunk in cache.chunks([column]))

    def _by_document(self, cache: Cache) -> Iterator[Chosen]:
        whole = self._chosen(chunk_names(cache.chunk_numbers))
        for at, chunk in enumerate(cache.chunk_numbers.tolist()):
            start, stop = cache.chunk_starts[at : at + 2].tolist()
            if chunk >= CUT_CHUNKS:
                yield np.full(stop - start, whole[at])
                continue
            documents = cache.read(np.arange(start, stop), [DOCUMENTS])[DOCUMENTS]
            assert isinstance(documents, Ragged)
            trained = groups_on_training_side(document_groups(documents), chunk, self.fraction, self.seed)
            yield trained if self.side == "train" else ~trained

    def _chosen(self, names: Iterator[bytes] | Iterator[memoryview]) -> Chosen:
        trained = on_training_side(names, self.fraction, self.seed)
        return trained if self.side == "train" else ~trained

    def _warn_far_from_fraction(self, cache: Cache, rows: int) -> None:
        wanted = self.fraction if self.side == "train" else 1 - self.fraction
        share = rows / len(cache)
        if abs(share - wanted) > FAR_FROM_FRACTION or (share == 1 and wanted < 1):
            warnings.warn(
                f"the {self.side} side of '{cache.root}' has {share:.1%} of the rows instead of {wanted:.1%} "
                f"({len(cache):,} rows in {len(cache.chunk_numbers):,} chunks, split by {self._chosen_by(cache)}); "
                "choose another seed, or split a larger cache",
                stacklevel=3,
            )


@dataclass(frozen=True, slots=True, eq=False)
class Where:
    """The rows for which `predicate` is true: of all rows, or of those that the rule `within` selects.

    The predicate is called once per chunk, with the named columns of all its rows, and returns one bool per row. A
    loader's state identifies the rule by its name and by a digest of the selected rows.

        Where("long", lambda columns: columns["length"] >= 40, columns=["length"])
    """

    name: str
    predicate: Callable[[Columns], Chosen]
    columns: Sequence[str]
    within: SelectionRule | None = None

    def __post_init__(self) -> None:
        checked_names("columns", self.columns)

    @property
    def digest(self) -> str:
        return f"where {self.name}" + (f", within {self.within.digest}" if self.within else "")

    def select(self, cache: Cache) -> Selection:
        """Return the rows for which the predicate is true."""
        selection = _selected(cache, self, self._chosen, self.within)
        return _not_empty(selection, cache, self, "a predicate that some rows pass")

    def _chosen(self, cache: Cache) -> Iterator[Chosen]:
        for rows, columns in zip(np.diff(cache.chunk_starts).tolist(), cache.chunks(self.columns), strict=True):
            passed = self._passed(columns)
            if passed.shape != (rows,) or passed.dtype != np.bool_:
                raise TypeError(
                    f"the predicate '{self.name}' returned {passed.dtype} of shape {passed.shape} for {rows} rows; it "
                    "must return one bool per row"
                )
            yield passed

    def _passed(self, columns: Columns) -> Chosen:
        try:
            return np.asarray(self.predicate(columns))
        except Exception as error:
            error.add_note(f"raised by the predicate '{self.name}', called with the columns {sorted(columns)}")
            raise


class Present:
    """The rows that have all of some layers: of all rows, or of those that the rule `within` selects.

        Loader(cache, global_batch_size=64, columns=["latents", "clip_pooled"], selection=Present("latents", "clip"))

    A row that a teacher could not process is absent from its layer, and so are the rows of chunks that the layer does
    not have yet.
    """

    def __init__(self, *layers: str, within: SelectionRule | None = None) -> None:
        if not layers:
            raise ValueError('Present needs the names of layers: Present("latents", "clip")')
        self.layers, self.within = layers, within

    def __repr__(self) -> str:
        return f"<Present: rows {self.digest}>"

    @property
    def digest(self) -> str:
        return f"present in {', '.join(self.layers)}" + (f", within {self.within.digest}" if self.within else "")

    def select(self, cache: Cache) -> Selection:
        """Return the rows that have all layers."""
        selection = _selected(cache, self, self._chosen, self.within)
        return _not_empty(selection, cache, self, "layers that share rows, or build what they lack")

    def _chosen(self, cache: Cache) -> Iterator[Chosen]:
        layers = [layer for layer in self.layers if layer != cache.generation.base]
        has = np.ones(len(cache.chunk_numbers), np.bool_)
        for layer in layers:
            has &= np.isin(cache.chunk_numbers, cache.generation.table(layer).chunks)
        for (start, stop), has_chunk in zip(pairwise(cache.chunk_starts.tolist()), has.tolist(), strict=True):
            chosen = np.full(stop - start, has_chunk)
            if has_chunk:
                for bits in cache.read(np.arange(start, stop), list(map(presence_name, layers))).values():
                    chosen &= np.asarray(bits)
            yield chosen


Choose = Callable[[Cache], Iterator[Chosen]]


def _selected(cache: Cache, rule: SelectionRule, choose: Choose, within: SelectionRule | None = None) -> Selection:
    """Return the rows that `choose` yields chunk by chunk; it is called once for a rule and the rows of a cache."""
    key = (cache.generation.digest, cache.layers, rule)
    selection = _recent.get(key)
    if selection is None:
        outer = None if within is None else within.select(cache)
        while len(_recent) >= _MOST_RECENT:
            del _recent[next(iter(_recent))]
        selection = _recent[key] = Selection.of(_inside(choose(cache), outer), len(cache))
    return selection


def _inside(chosen: Iterator[Chosen], outer: Selection | None) -> Iterator[Chosen]:
    start = 0
    for part in chosen:
        stop = start + len(part)
        yield part if outer is None else part & outer.mask(start, stop)
        start = stop


def _not_empty(selection: Selection, cache: Cache, rule: SelectionRule, advice: str) -> Selection:
    if not len(selection):
        raise NotFound(
            f"none of the {len(cache):,} rows in {len(cache.chunk_numbers):,} chunks of '{cache.root}' "
            f"is in the selection '{rule.digest}'",
            hint=f"choose {advice}",
        )
    return selection
