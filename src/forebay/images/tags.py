"""Tags of images: their vocabulary, and tags as indices or multi-hot vectors.

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
from forebay.errors import ForebayError, RecipeInvalid

MOST_TAGS = 1 << 21  # counted at once, in memory
SEPARATOR = ","
TagKey = str | tuple[str, ...]
_TELLING = 20  # images with tags, below which rare tags are not worth a note
Indices = NDArray[np.uint32]


class ImageUnreadable(ForebayError):
    """Why a sample has no row: `reason` is a short code and `detail` a sentence, as a recorded failure keeps them."""

    def __init__(self, reason: str, detail: str) -> None:
        self.reason, self.detail = reason, detail
        super().__init__(f"the image cannot be used ({reason}): {detail}", hint="fix or remove the file")


@dataclass(frozen=True, slots=True)
class Tags:
    """A vocabulary: the index of a tag is its position in `names`."""

    names: tuple[str, ...] = ()
    note: str = field(default="", compare=False)  # a hint that the counted tags may not be tags
    _indices: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        indices = {name: index for index, name in enumerate(self.names)}
        if len(indices) < len(self.names):
            twice = next(name for name, count in Counter(self.names).items() if count > 1)
            raise RecipeInvalid(f"the tag '{twice}' is in the vocabulary twice", hint="name each tag once")
        object.__setattr__(self, "_indices", indices)

    @classmethod
    def counted(
        cls,
        annotations: Iterable[Mapping[str, Any]],
        key: TagKey,
        min_count: int = 1,
        separator: str | None = None,
    ) -> "Tags":
        """Return the tags of a whole source, the most frequent first, equally frequent ones by name.

        >>> Tags.counted([{"tags": ["b", "a"]}, {"tags": "b, c"}, {}], "tags").names
        ('b', 'a', 'c')
        """
        counts: Counter[str] = Counter()
        tagged = 0
        for metadata in annotations:
            try:
                tags = tags_in(metadata, key, separator)
            except ImageUnreadable:
                continue  # its row will fail, and be recorded
            counts.update(tags)
            tagged += bool(tags)
            if len(counts) > MOST_TAGS:
                raise RecipeInvalid(
                    f"the source has more than {MOST_TAGS:,} different tags under {shown_key(key)}, as sentences are",
                    hint="name the key of the tags (tag_key=, --tag-key), what is between them (tag_separator=, "
                    "--tag-separator), or the vocabulary itself (tags=, --tags)",
                )
        names = sorted(counts, key=lambda name: (-counts[name], name))
        return cls(tuple(name for name in names if counts[name] >= min_count), _oddity(counts, tagged, min_count))

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self._indices

    def indices(self, names: Iterable[str]) -> Indices:
        """Return the indices of the known tags, in ascending order, each once.

        >>> Tags(("cat", "dog")).indices(["dog", "unicorn", "dog"]).tolist()
        [1]
        """
        return np.array(sorted({self._indices[name] for name in names if name in self._indices}), np.uint32)

    def named(self, indices: Iterable[int]) -> tuple[str, ...]:
        return tuple(self.names[index] for index in indices)

    def multi_hot(self, rows: Ragged | Sequence[Indices]) -> NDArray[np.bool_]:
        """Return bools `[images, tags]`, True where an image has a tag.

        >>> Tags(("cat", "dog")).multi_hot([np.array([1], np.uint32), np.array([], np.uint32)]).tolist()
        [[False, True], [False, False]]
        """
        ragged = rows if isinstance(rows, Ragged) else Ragged.of(list(rows), np.dtype(np.uint32))
        hot = np.zeros((len(ragged), len(self)), np.bool_)
        hot[np.repeat(np.arange(len(ragged)), ragged.lengths), ragged.values] = True
        return hot

    def swapped(self, pairs: Mapping[str, str]) -> NDArray[np.int64]:
        """Return the index that each tag gets when an image is flipped; applying it twice changes nothing.

        >>> Tags(("cat", "looking_left", "looking_right")).swapped({"looking_left": "looking_right"}).tolist()
        [0, 2, 1]
        """
        order = np.arange(len(self), dtype=np.int64)
        for one, other in pairs.items():
            for name in (one, other):
                if name not in self._indices:
                    raise RecipeInvalid(f"the orientation tag '{name}' is not in the vocabulary of {len(self):,} tags")
            first, second = self._indices[one], self._indices[other]
            if order[first] not in (first, second) or order[second] not in (first, second):
                raise RecipeInvalid(f"the orientation tag '{one}' or '{other}' is in two pairs; a flip swaps two tags")
            order[first], order[second] = second, first
        return order


def tags_in(metadata: Mapping[str, Any], key: TagKey, separator: str | None = None) -> list[str]:
    """Return the tags that metadata has under one key or several, each once.

    A value is a string with commas, or with `separator`, between tags; or a list of strings and of objects with a
    `name`. Strings of a list are whole tags, unless a `separator` is passed.

    >>> tags_in({"tags": "cat, looking left, cat,"}, "tags")
    ['cat', 'looking left']
    >>> tags_in({"tag_string_general": "1girl solo", "rating": "g"}, ("tag_string_general", "rating"), " ")
    ['1girl', 'solo', 'g']
    """
    keys = (key,) if isinstance(key, str) else key
    return list(dict.fromkeys(name for each in keys for name in _tags_under(metadata, each, separator)))


def shown_key(key: TagKey) -> str:
    """Return a key, or several, for a message.

    >>> shown_key("tags"), shown_key(("general", "character"))
    ("'tags'", "'general', 'character'")
    """
    return ", ".join(f"'{each}'" for each in ((key,) if isinstance(key, str) else key))


def _tags_under(metadata: Mapping[str, Any], key: str, separator: str | None) -> Iterable[str]:
    value = metadata.get(key)
    if value is None:
        return ()
    if isinstance(value, str):
        return _split(value, separator or SEPARATOR)
    if isinstance(value, list | tuple):
        names: list[Any] = [one.get("name") if isinstance(one, Mapping) else one for one in value]
        if all(isinstance(name, str) for name in names):
            return names if separator is None else [tag for name in names for tag in _split(name, separator)]
    raise ImageUnreadable(
        "bad-tags", f"'{key}' is {value!r:.60}, neither a list of strings nor a string with {separator or 'commas'}"
    )


def _split(text: str, separator: str) -> list[str]:
    return [name for part in text.split(separator) if (name := part.strip())]


def _oddity(counts: Mapping[str, int], images: int, min_count: int) -> str:
    """Return a note on tags that are probably not tags; else ""."""
    spaced = [name for name in counts if " " in name]
    if len(spaced) * 2 > len(counts):
        return (
            f"{len(spaced):,} of {len(counts):,} tags hold spaces, as sentences do ('{spaced[0]:.60}'); if spaces "
            "separate tags, pass tag_separator=' ' (--tag-separator ' ')"
        )
    once = sum(count == 1 for count in counts.values())
    if min_count == 1 and images >= _TELLING and once * 2 > len(counts):
        return (
            f"{once:,} of {len(counts):,} tags occur once; min_tag_count=2 (--min-tag-count 2) leaves them out, "
            "tag_separator (--tag-separator) says what is between tags"
        )
    return ""
