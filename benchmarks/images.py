"""Images: building against bare Pillow, reading against Pillow, other formats and a bare copy, bytes against float32.

    python -m benchmarks.images --data FOLDER              5,000 images: the photographs of the folder, repeated
    python -m benchmarks.images --data FOLDER --prepare    make all that is read, and leave it for the next run

Goals: build ≥ 0.85 × a bare decode + resize loop for each core, two workers ≥ 1.7 × one; batches of 448² from a raw
cache with two threads ≥ 15 × (uint8) and ≥ 6 × (normalised float32) the same from JPEG with Pillow in a DataLoader with
two workers, ≥ 2 × LitData, MDS and WebDataset holding the same pixels, ≥ 0.3 × a bare `out.copy_(uint8)`; reading from
the tier on disk ≥ 0.7 × a plain LMDB get and copy; ≤ 0.2 × the bytes of float32.
"""

import argparse
import os
import shutil
import tempfile
from pathlib import Path

from benchmarks.image_build import measure_build, measure_bytes
from benchmarks.image_data import Images
from benchmarks.image_read import PEERS, measure_reading
from benchmarks.image_tier import measure_tier

TIER_IMAGES = 1000


def main() -> None:
    options = _options()
    images = Images(options.folder / "images", options.data, options.images, options.environments)
    try:
        if options.prepare:
            prepare(images)
        else:
            measure(images, options)
    finally:
        if not (options.keep or options.prepare):
            for name in ("images", "tier-images"):
                shutil.rmtree(options.folder / name, ignore_errors=True)


def prepare(images: Images) -> None:
    images.cache()
    for peer in PEERS:
        images.peer(peer)
    images.drop_canvases()


def measure(images: Images, options: argparse.Namespace) -> None:
    measure_build(images, options.rounds)
    measure_bytes(images)
    measure_reading(images, options.environments, options.seconds)
    fewer = min(TIER_IMAGES, options.images)
    measure_tier(Images(options.folder / "tier-images", options.data, fewer, options.environments))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    below = Path(os.environ.get("FOREBAY_BENCH_DIR", tempfile.gettempdir())) / "forebay-bench"
    parser.add_argument("--images", type=int, default=5000, help="how many; the photographs are repeated")
    parser.add_argument("--data", type=Path, help="a folder of photographs; without it, noise of their size")
    parser.add_argument("--rounds", type=int, default=2, help="of the builds")
    parser.add_argument("--seconds", type=float, default=4, help="for each configuration of a peer")
    parser.add_argument("--folder", type=Path, default=below, help="outside the repository; 15 GB for 5,000 images")
    parser.add_argument("--environments", type=Path, default=below / "environments", help="of the peers; 7 GB, kept")
    parser.add_argument("--keep", action="store_true", help="leave the data there, for the next run")
    parser.add_argument("--prepare", action="store_true", help="make the data, measure nothing")
    return parser.parse_args()


if __name__ == "__main__":
    main()
