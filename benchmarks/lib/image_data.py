"""Images for benchmarks: photographs repeated to a number, a cache of them, and the same pixels in a plain file."""

import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

import forebay as fb
from benchmarks.lib.files import prepared
from benchmarks.lib.options import Options
from benchmarks.lib.peers import Peer, run_peer
from forebay.torch import ImageBatch, Loader

SIZE = 448
BATCH = 32
RECIPE = fb.ImageRecipe(size=SIZE, tags=())
GENERATED = 250


@dataclass(frozen=True)
class Images:
    """Each form of the images is written on first use."""

    folder: Path
    photographs: Path | None  # without them, noise of their size
    count: int
    environments: Path

    @classmethod
    def of(cls, options: Options) -> "Images":
        count = 100 if options.is_quick else 2000
        return cls(options.folder / f"images-{count}", options.images, count, options.environments)

    @property
    def inputs(self) -> str:
        return f"{self.count} images of {self.photographs or 'noise'} at {SIZE}, recipe {fb.fingerprint(RECIPE)}"

    def files(self) -> Path:
        """JPEG files, the photographs again and again."""
        return prepared(self.folder / "files", self.inputs, self._write_files)

    def source(self) -> fb.Source:
        return fb.sources.images(self.files())

    def cache(self) -> Path:
        return prepared(self.folder / "cache", self.inputs, lambda root: fb.build(root, self.source(), RECIPE))

    def canvases(self) -> Path:
        """A file with every canvas `[3, 448, 448]`, from which peers write their formats."""
        return prepared(self.folder / "canvases", self.inputs, self._write_canvases) / "pixels"

    def written_by(self, peer: Peer) -> Path:
        folder = self.folder / Path(peer.script).stem
        return prepared(
            folder, self.inputs, lambda there: run_peer(peer, self.environments, "write", self.canvases(), there)
        )

    def _write_files(self, folder: Path) -> None:
        folder.mkdir()
        originals = list(self._originals())
        for number in range(self.count):
            (folder / f"{number:06d}.jpg").write_bytes(originals[number % len(originals)])

    def _originals(self) -> Iterator[bytes]:
        if self.photographs is None:
            yield from map(_noise, range(GENERATED))
        else:
            yield from (path.read_bytes() for path in sorted(self.photographs.iterdir()))

    def _write_canvases(self, folder: Path) -> None:
        folder.mkdir()
        cache = fb.open_cache(self.cache())
        loader = Loader(
            cache, global_batch_size=BATCH, shuffle=None, drop_last=False, collate=ImageBatch(cache, tags=None)
        )
        with open(folder / "pixels", "wb") as file:
            for batch in loader:
                file.write(batch["pixels"].numpy())


def _noise(number: int) -> bytes:
    """A JPEG about as large and as detailed as a photograph of 500 × 375."""
    random = np.random.default_rng(number)
    coarse = Image.fromarray(random.integers(0, 256, (38, 50, 3), np.uint8)).resize(
        (500, 375), Image.Resampling.BICUBIC
    )
    grain = np.asarray(coarse, np.int16) + random.integers(-12, 13, (375, 500, 3))
    buffer = io.BytesIO()
    Image.fromarray(grain.clip(0, 255).astype(np.uint8)).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()
