"""Latents, T5 states and CLIP's pooled output of every sample, as the document names them."""

import os
from collections.abc import Sequence
from typing import ClassVar

from numpy.typing import ArrayLike
from torch import Tensor

from forebay import api
from forebay.cache.reader import Cache, open_cache
from forebay.errors import ColumnNotFound
from forebay.torch.experts.stored import StoredColumn
from forebay.torch.experts.workplace import Image
from forebay.torch.experts.zoo import ModelZoo

Path = str | os.PathLike[str]


class EncodingCache:
    """The layers `latents`, `t5` and `clip` of a cache, or those of them that it has."""

    # The document's names -> columns; the mask of T5's tokens is ours.
    names: ClassVar[dict[str, str]] = {
        "latents": "latents", "t5_embeds": "t5_states", "t5_mask": "t5_mask", "clip_pooled": "clip_pooled",
    }  # fmt: skip

    def __init__(self, cache: Cache) -> None:
        self.cache = cache

    @classmethod
    def build(cls, zoo: ModelZoo, images: Sequence[Image], prompts: Sequence[str]) -> "EncodingCache":
        """Encode letterboxed images (paths, or images of pillow) and prompts, with the models that the zoo has."""
        size = 512 if zoo.vae is None else zoo.vae.size
        root = zoo.workplace.root_of_images(images, prompts, size)
        zoo.ask(root, *zoo.encodings)
        return cls(open_cache(root))

    @classmethod
    def load(cls, path: Path) -> "EncodingCache":
        return cls(open_cache(path))

    def save(self, path: Path) -> None:
        """Copy the cache to a folder of this name."""
        api.copy(self.cache.root, path)

    def __len__(self) -> int:
        return len(self.cache)

    @property
    def latents(self) -> StoredColumn:
        return self._column("latents")

    @property
    def t5_embeds(self) -> StoredColumn:
        return self._column("t5_embeds")

    @property
    def clip_pooled(self) -> StoredColumn:
        return self._column("clip_pooled")

    def get(self, indices: Tensor | ArrayLike) -> dict[str, Tensor]:
        """The encodings of some rows, by the document's names; those that the cache has."""
        return {
            name: StoredColumn(self.cache, column).read(indices)
            for name, column in self.names.items()
            if column in self.cache.columns
        }

    def _column(self, name: str) -> StoredColumn:
        if self.names[name] not in self.cache.columns:
            raise ColumnNotFound(self.cache.root, self.names[name], self.cache.columns)
        return StoredColumn(self.cache, self.names[name])
