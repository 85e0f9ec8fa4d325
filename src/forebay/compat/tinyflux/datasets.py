"""A data set with its encodings and teachers: one cache, whose layers are the document's parts."""

import os
from collections.abc import Sequence
from typing import ClassVar

from numpy.typing import ArrayLike
from torch import Tensor

from forebay import api
from forebay.compat.pt_cache import PARTS
from forebay.compat.tinyflux.experts import LuneFeatureCache, SolFeatureCache, StoredColumn
from forebay.compat.tinyflux.prompt_caches import ENCODINGS, Image, ModelZoo
from forebay.errors import ColumnNotFound, OldCacheInvalid
from forebay.read.cache import Cache, open_cache

Path = str | os.PathLike[str]


class EncodingCache:
    """The layers `latents`, `t5` and `clip` of a cache, as far as it has them."""

    # The document's names -> columns; the mask of T5's tokens is an addition.
    names: ClassVar[dict[str, str]] = {
        "latents": "latents", "t5_embeds": "t5_states", "t5_mask": "t5_mask", "clip_pooled": "clip_pooled",
    }  # fmt: skip

    def __init__(self, cache: Cache) -> None:
        self.cache = cache

    @classmethod
    def build(cls, zoo: ModelZoo, images: Sequence[Image], prompts: Sequence[str]) -> "EncodingCache":
        """Encode letterboxed images (paths or Pillow images) and prompts, with the models that the zoo has."""
        size = 512 if zoo.vae is None else zoo.vae.size
        root = zoo.prompt_caches.root_of_images(images, prompts, size)
        zoo.build_layers(root, *zoo.encodings)
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
        """Return the encodings of some rows that the cache has, by the document's names."""
        return {
            name: StoredColumn(self.cache, column).read(indices)
            for name, column in self.names.items()
            if column in self.cache.columns
        }

    def _column(self, name: str) -> StoredColumn:
        if self.names[name] not in self.cache.columns:
            raise ColumnNotFound(self.cache.root, self.names[name], self.cache.columns)
        return StoredColumn(self.cache, self.names[name])


Part = EncodingCache | LuneFeatureCache | SolFeatureCache


class DatasetCache:
    """The encodings and teacher features of a data set; `lune` and `sol` are None without that teacher."""

    def __init__(
        self,
        encodings: EncodingCache | None,
        lune: LuneFeatureCache | None = None,
        sol: SolFeatureCache | None = None,
        *,
        name: str = "",
    ) -> None:
        parts: list[Part] = [part for part in (encodings, lune, sol) if part is not None]
        if not parts:
            raise ValueError("a DatasetCache needs encodings, Lune or Sol")
        roots = {part.cache.root for part in parts}
        if len(roots) > 1:
            raise ValueError(
                f"these are parts of different caches: {', '.join(sorted(roots))}; build all parts from the same "
                "prompts, with the same ModelZoo and settings"
            )
        # The part that was built last pins the generation with all of them.
        newest = max((part.cache for part in parts), key=lambda cache: cache.generation.number)
        self.cache: Cache = newest
        self.encodings = None if encodings is None else EncodingCache(newest)
        self.lune = None if lune is None else LuneFeatureCache(newest)
        self.sol = None if sol is None else SolFeatureCache(newest)
        self.name = name or os.path.basename(os.path.normpath(newest.root))

    @classmethod
    def build(
        cls,
        zoo: ModelZoo,
        images: Sequence[Image],
        prompts: Sequence[str],
        *,
        name: str = "",
        batch_timesteps: bool = False,
    ) -> "DatasetCache":
        """Build everything that the zoo has a model for, one model at a time."""
        size = 512 if zoo.vae is None else zoo.vae.size
        root = zoo.prompt_caches.root_of_images(images, prompts, size)
        zoo.build_layers(root, *zoo.encodings)
        zoo.build_layers(root, *(() if zoo.lune is None else ("lune",)), "sol", batch_timesteps=batch_timesteps)
        return cls.of(open_cache(root), name)

    @classmethod
    def load(cls, path: Path) -> "DatasetCache":
        """Open a cache that `save`, `build` or the command line made."""
        if os.path.isfile(path) or any(os.path.exists(os.path.join(path, f"{part}.pt")) for part in PARTS):
            raise OldCacheInvalid(
                os.fspath(path), "it has the old format; import it with `forebay import OLD --into CACHE`"
            )
        return cls.of(open_cache(path))

    @classmethod
    def of(cls, cache: Cache, name: str = "") -> "DatasetCache":
        """Return the data set of a cache, with the parts that it has."""
        layers = cache.generation.recipes
        encodings = EncodingCache(cache) if any(layer in layers for layer in ENCODINGS) else None
        lune = LuneFeatureCache(cache) if "lune" in layers else None
        sol = SolFeatureCache(cache) if "sol" in layers else None
        return cls(encodings, lune, sol, name=name)

    def save(self, path: Path) -> None:
        """Copy the cache to a folder of this name, every chunk checked on the way."""
        api.copy(self.cache.root, path)

    def __len__(self) -> int:
        return len(self.cache)

    def get(self, indices: Tensor | ArrayLike) -> dict[str, Tensor]:
        """Return the encodings of some rows."""
        return {} if self.encodings is None else self.encodings.get(indices)
