"""A data set with its encodings and teachers: one cache, of which the document's parts are layers."""

import os
from collections.abc import Sequence

from numpy.typing import ArrayLike
from torch import Tensor

from forebay import api
from forebay.cache.reader import Cache, open_cache
from forebay.errors import OldCacheInvalid
from forebay.torch.experts.encodings import EncodingCache
from forebay.torch.experts.timed import LuneFeatureCache, SolFeatureCache
from forebay.torch.experts.workplace import Image
from forebay.torch.experts.zoo import ENCODINGS, ModelZoo
from forebay.torch.old_cache import PARTS

Path = str | os.PathLike[str]
Part = EncodingCache | LuneFeatureCache | SolFeatureCache


class DatasetCache:
    """What is known of the samples of a data set; `lune` and `sol` are None where there is no such teacher."""

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
                f"these are parts of different caches: {', '.join(sorted(roots))}; build all of the same prompts, with "
                "the same ModelZoo and settings"
            )
        # The part that was built last has seen the generation with all of them.
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
        """Everything the zoo has a model for, in sequence, one model at a time."""
        size = 512 if zoo.vae is None else zoo.vae.size
        root = zoo.workplace.root_of_images(images, prompts, size)
        zoo.ask(root, *zoo.encodings)
        zoo.ask(root, *(() if zoo.lune is None else ("lune",)), "sol", batch_timesteps=batch_timesteps)
        return cls.of(open_cache(root), name)

    @classmethod
    def load(cls, path: Path) -> "DatasetCache":
        """A cache that `save`, `build` or the command line left."""
        if os.path.isfile(path) or any(os.path.exists(os.path.join(path, f"{part}.pt")) for part in PARTS):
            raise OldCacheInvalid(
                os.fspath(path), "it is of the old format; make a cache of it with `forebay import OLD --into CACHE`"
            )
        return cls.of(open_cache(path))

    @classmethod
    def of(cls, cache: Cache, name: str = "") -> "DatasetCache":
        """A cache with the parts that it has."""
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
        """The encodings of some rows."""
        return {} if self.encodings is None else self.encodings.get(indices)
