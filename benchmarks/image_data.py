"""What the benchmark of images reads: photographs repeated to a number, a cache of them, and the same pixels plain."""

import io
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

import forebay as fb
from benchmarks.loader_peers import Peer, environment, script
from benchmarks.prepared import prepared
from forebay.torch import ImageBatch, Loader

SIZE = 448
BATCH = 32
RECIPE = fb.ImageRecipe(size=SIZE, tags=())
GENERATED = 250


class Images:
    """Each thing is made when it is first asked for, unless a former run left it."""

    def __init__(self, folder: Path, photographs: Path | None, count: int, environments: Path) -> None:
        self.folder, self.count = folder, count
        self._photographs, self._environments = photographs, environments
        self._made_of = f"{count} images of {photographs or 'noise'} at {SIZE}, forebay {fb.fingerprint(RECIPE)}"

    def files(self) -> Path:
        """JPEG files, the photographs again and again."""
        return prepared(self.folder / "files", self._made_of, self._write_files)

    def source(self) -> fb.Source:
        return fb.sources.images(self.files())

    def cache(self) -> Path:
        return prepared(self.folder / "cache", self._made_of, lambda root: fb.build(root, self.source(), RECIPE))

    def canvases(self) -> Path:
        """A file with every canvas `[3, 448, 448]`, for peers to write their own formats of."""
        return prepared(self.folder / "canvases", self._made_of, self._write_canvases) / "pixels"

    def peer(self, peer: Peer) -> Path:
        """What a peer wrote of the canvases."""
        python = environment(peer, self._environments)
        place = self.folder / peer.script.removesuffix(".py")
        return prepared(place, self._made_of, lambda there: script(peer, python, "write", self.canvases(), there))

    def drop_canvases(self) -> None:
        """They are as large as what a peer makes of them, and of no use once all peers have theirs."""
        (self.folder / "canvases.complete").unlink(missing_ok=True)
        shutil.rmtree(self.folder / "canvases", ignore_errors=True)

    def _write_files(self, place: Path) -> None:
        place.mkdir()
        originals = list(self._originals())
        for number in range(self.count):
            (place / f"{number:06d}.jpg").write_bytes(originals[number % len(originals)])

    def _originals(self) -> Iterator[bytes]:
        if self._photographs is None:
            yield from map(_noise, range(GENERATED))
        else:
            yield from (path.read_bytes() for path in sorted(self._photographs.iterdir()))

    def _write_canvases(self, place: Path) -> None:
        place.mkdir()
        cache = fb.open_cache(self.cache())
        loader = Loader(
            cache, global_batch_size=BATCH, shuffle=None, drop_last=False, collate=ImageBatch(cache, tags=None)
        )
        with open(place / "pixels", "wb") as file:
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
