"""Which document of the source a piece of a row is from: found by reading the slice of its chunk again.

It is a help, never needed: where the user does not name the source, or it changed or is costly to read, there are no
names. A source that only the cache names is not read: whoever made the cache chose which files those are.
"""

from collections.abc import Iterable
from functools import lru_cache

from forebay.cache.grow import named_alike
from forebay.cache.plan import LeftOut, load_plan
from forebay.cache.reader import Cache
from forebay.errors import ForebayError
from forebay.source import Failure, Part, Sample, Source

# A compressed file is read from its beginning: what lies deep in it takes too long for a look.
DEEPEST_IN_STREAM = 256 * 1024 * 1024


class PieceNames:
    """The ids of the documents of chunks, as a recipe numbers them."""

    def __init__(self, cache: Cache, source: Source | None) -> None:
        self._cache, self._source = cache, source
        self._of_chunk = lru_cache(maxsize=2)(self._read)

    def of(self, chunk: int, numbers: Iterable[int]) -> dict[int, str]:
        """number of a document among those its chunk was made of -> its id, for those that are known."""
        names = self._of_chunk(chunk)
        return {number: names[number] for number in numbers if number < len(names)}

    def _read(self, chunk: int) -> tuple[str, ...]:
        if self._source is None:
            return ()
        try:
            plan = load_plan(self._cache.store)
            source, parts = named_alike(self._source, plan), plan.parts(chunk)
            if any(_is_costly(part) or _is_other(source, part) for part in parts):
                return ()
            return tuple(_given(source, parts, plan.left_out(chunk)))
        except (ForebayError, OSError):
            return ()


def _given(source: Source, parts: list[Part], left_out: LeftOut | None) -> Iterable[str]:
    """The ids of what the recipe was given: neither failures nor what the plan leaves out."""
    duplicates = frozenset(left_out.ordinals.tolist()) if left_out is not None else frozenset()
    samples: Iterable[Sample | Failure] = (sample for part in parts for sample in source.read(part))
    for ordinal, sample in enumerate(samples):
        if isinstance(sample, Sample) and ordinal not in duplicates:
            yield sample.id


def _is_costly(part: Part) -> bool:
    return part.file.stream and part.stop > DEEPEST_IN_STREAM


def _is_other(source: Source, part: Part) -> bool:
    """Whether a file is not the one that was planned; with more behind it, its beginning may still be."""
    now = source.look(part.file.path)
    return now.size < part.file.size or (now.size == part.file.size and now.mtime_ns != part.file.mtime_ns)
