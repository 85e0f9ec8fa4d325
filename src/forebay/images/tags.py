"""Tags: names of an image's traits, their vocabulary, and the two ways they are read.

vocabulary   0 cat   1 looking_left   2 looking_right   3 outdoors
image        ["outdoors", "cat"]      indices 0 3       multi-hot 1 0 0 1
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.columns import Ragged
from forebay.errors import ImageUnreadable, RecipeInvalid

Indices = NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Tags:
    """A vocabulary: the index of a tag is its place in `names`."""

    names: tuple[str, ...] = ()
    _places: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        places = {name: place for place, name in enumerate(self.names)}
        if len(places) < len(self.names):
            twice = next(name for name, count in Counter(self.names).items() if count > 1)
            raise RecipeInvalid(f"the tag '{twice}' is in the vocabulary twice; name each tag once")
        object.__setattr__(self, "_places", places)

    @classmethod
    def counted(cls, annotations: Iterable[Mapping[str, Any]], key: str, min_count: int = 1) -> "Tags":
        """The tags of a whole source, the most frequent first, equally frequent ones by name.

        >>> Tags.counted([{"tags": ["b", "a"]}, {"tags": "b, c"}, {}], "tags").names
        ('b', 'a', 'c')
        """
        counts: Counter[str] = Counter()
        for metadata in annotations:
            try:
                counts.update(tags_in(metadata, key))
            except ImageUnreadable:
                continue  # its row fails by itself, and is recorded
        return cls(
            tuple(name for name in sorted(counts, key=lambda name: (-counts[name], name)) if counts[name] >= min_count)
        )

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def indices(self, names: Iterable[str]) -> Indices:
        """The places of the tags that are known, rising, each once.

        >>> Tags(("cat", "dog")).indices(["dog", "unicorn", "dog"]).tolist()
        [1]
        """
        return np.array(sorted({self._places[name] for name in names if name in self._places}), np.uint32)

    def named(self, indices: Iterable[int]) -> tuple[str, ...]:
        return tuple(self.names[index] for index in indices)

    def multi_hot(self, rows: Ragged | Sequence[Indices]) -> NDArray[np.bool_]:
        """`[images, tags]`: True where an image has a tag.

        >>> Tags(("cat", "dog")).multi_hot([np.array([1], np.uint32), np.array([], np.uint32)]).tolist()
        [[False, True], [False, False]]
        """
        ragged = rows if isinstance(rows, Ragged) else Ragged.of(list(rows), np.dtype(np.uint32))
        hot = np.zeros((len(ragged), len(self)), np.bool_)
        hot[np.repeat(np.arange(len(ragged)), ragged.lengths), ragged.values] = True
        return hot

    def swapped(self, pairs: Mapping[str, str]) -> NDArray[np.int64]:
        """What each tag becomes when an image is flipped: an index for every index, its own inverse.

        >>> Tags(("cat", "looking_left", "looking_right")).swapped({"looking_left": "looking_right"}).tolist()
        [0, 2, 1]
        """
        order = np.arange(len(self), dtype=np.int64)
        for one, other in pairs.items():
            for name in (one, other):
                if name not in self._places:
                    raise RecipeInvalid(f"the orientation tag '{name}' is not in the vocabulary of {len(self):,} tags")
            first, second = self._places[one], self._places[other]
            if order[first] not in (first, second) or order[second] not in (first, second):
                raise RecipeInvalid(f"the orientation tag '{one}' or '{other}' is in two pairs; a flip swaps two tags")
            order[first], order[second] = second, first
        return order


def tags_in(metadata: Mapping[str, Any], key: str) -> list[str]:
    """The tags that metadata names, each once: a list of strings, or one string with commas between them.

    >>> tags_in({"tags": "cat, looking left, cat,"}, "tags")
    ['cat', 'looking left']
    """
    found = metadata.get(key)
    if found is None:
        return []
    if isinstance(found, str):
        return list(dict.fromkeys(name for part in found.split(",") if (name := part.strip())))
    if isinstance(found, list | tuple) and all(isinstance(name, str) for name in found):
        return list(dict.fromkeys(found))
    raise ImageUnreadable("bad-tags", f"'{key}' is {found!r:.60}, neither a list of strings nor a string with commas")
