"""Tags and class labels of the images of a batch, after their flip."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from forebay.columns import Array, Ragged
from forebay.images import ImageRecipe
from forebay.images.tags import Tags
from forebay.masks.documents import IGNORED_LABEL

TagStyle = Literal["multi_hot", "indices"]
ORIENTATION = {"looking_left": "looking_right"}


def sample_id(rows: Mapping[str, Any], image: int) -> str:
    """Return the sample id of an image of a batch."""
    return bytes(list(rows["id"])[image]).decode("utf-8", "backslashreplace")


class TagReader:
    """Makes `tags` and `label` from stored tag indices, or with another `vocabulary` from stored metadata."""

    def __init__(
        self,
        recipe: ImageRecipe,
        style: TagStyle | None,
        vocabulary: Sequence[str] | None,
        classes: Sequence[str] | None,
        orientation: Mapping[str, str] | None,
    ) -> None:
        self._recipe, self._style = recipe, style
        self._from_metadata = vocabulary is not None
        self.vocabulary = recipe.vocabulary() if vocabulary is None else Tags(_checked_tags("vocabulary", vocabulary))
        self.classes = None if classes is None else _checked_classes(classes, self.vocabulary)
        pairs = _known(ORIENTATION, self.vocabulary) if orientation is None else orientation
        self._swapped = self.vocabulary.swapped(pairs)
        self._class_of_tag = np.full(len(self.vocabulary), IGNORED_LABEL, np.int64)
        for number, name in enumerate(self.classes or ()):
            self._class_of_tag[self.vocabulary.indices([name])] = number

    @property
    def columns(self) -> tuple[str, ...]:
        """The stored columns that are read."""
        if self._style is None and self.classes is None:
            return ()
        return ("metadata",) if self._from_metadata else ("tags",)

    @property
    def shared_fields(self) -> tuple[str, ...]:
        """The recipe fields that the tags of a row depend on."""
        return {"metadata": ("tag_key", "tag_separator"), "tags": ("tags",)}[self.columns[0]] if self.columns else ()

    def read(self, rows: Mapping[str, Any], flipped: NDArray[np.bool_]) -> dict[str, Array | Ragged]:
        """Return the tags of a batch, and the labels if classes were named."""
        if not self.columns:
            return {}
        tags = self._indices(rows, flipped)
        batch: dict[str, Array | Ragged] = {}
        if self._style is not None:
            batch["tags"] = tags if self._style == "indices" else self.vocabulary.multi_hot(tags).astype(np.float32)
        if self.classes is not None:
            batch["label"] = self._labels(rows, tags, self.classes)
        return batch

    def _indices(self, rows: Mapping[str, Any], flipped: NDArray[np.bool_]) -> Ragged:
        """Return the tag indices of every image, in ascending order."""
        stored: Iterable[Array] = rows[self.columns[0]]
        if self._from_metadata:
            stored = [self.vocabulary.indices(self._recipe.tags_of(np.asarray(each))) for each in stored]
        tags = [self._swapped[row] if flip else row for row, flip in zip(stored, flipped.tolist(), strict=True)]
        return Ragged.of([np.sort(row) for row in tags], np.dtype(np.int64))

    def _labels(self, rows: Mapping[str, Any], tags: Ragged, classes: tuple[str, ...]) -> NDArray[np.int64]:
        numbers, image = self._class_of_tag[tags.values], np.repeat(np.arange(len(tags)), tags.lengths)
        is_class = numbers != IGNORED_LABEL
        numbers, image = numbers[is_class], image[is_class]
        for several in np.flatnonzero(np.bincount(image, minlength=len(tags)) > 1).tolist():
            names = [classes[each] for each in numbers[image == several].tolist()]
            raise ValueError(
                f"'{sample_id(rows, several)}' has {len(names)} classes, {', '.join(names)}, but an image can have "
                "only one; name other classes, or train on its tags"
            )
        labels = np.full(len(tags), IGNORED_LABEL, np.int64)
        labels[image] = numbers
        return labels


def _known(pairs: Mapping[str, str], vocabulary: Tags) -> dict[str, str]:
    """Return the pairs that the vocabulary has; raise if it has one tag of a pair but not the other."""
    for one, other in (*pairs.items(), *((other, one) for one, other in pairs.items())):
        if one in vocabulary and other not in vocabulary:
            raise ValueError(
                f"the vocabulary has the tag '{one}' but not '{other}', which it becomes in a flip; add it to the "
                "recipe's tags, or pass orientation={} to leave tags unchanged"
            )
    return {one: other for one, other in pairs.items() if one in vocabulary}


def _checked_tags(argument: str, tags: Sequence[str]) -> tuple[str, ...]:
    if isinstance(tags, str) or not all(isinstance(name, str) for name in tags):
        raise TypeError(f"{argument} must be a sequence of tags, such as ('cat', 'dog') (got {tags!r:.60})")
    return tuple(tags)


def _checked_classes(classes: Sequence[str], vocabulary: Tags) -> tuple[str, ...]:
    names = tuple(vocabulary.named(range(len(vocabulary)))) if classes == "tags" else _checked_tags("classes", classes)
    unknown = [name for name in names if name not in vocabulary]
    if unknown or len(set(names)) != len(names) or not names:
        problem = f"unknown: {', '.join(unknown)}" if unknown else "none, or one twice"
        raise ValueError(
            f"classes must be different tags of the vocabulary ({problem}); pass some of its tags, or 'tags'"
        )
    return names
