"""Image batches: the loader next to Pillow in a DataLoader, and next to LitData with finished canvases."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

import forebay as fb
from benchmarks.lib.files import into_memory
from benchmarks.lib.image_data import BATCH, SIZE, Images
from benchmarks.lib.options import Options
from benchmarks.lib.peers import Peer, PeerFailed, readings
from benchmarks.lib.result import Result, compared
from benchmarks.lib.timing import forever, in_turn, rate_for
from forebay.torch import ImageBatch, Loader

CASE = "images.batches"
PILLOW = Peer("Pillow + DataLoader, two workers", "image_pillow.py")
LITDATA = Peer("LitData, uint8 canvases", "image_litdata.py", ("litdata",), home="peer_litdata")
DTYPES = {"uint8": torch.uint8, "float32, normalized": torch.float32}


def measure(options: Options) -> Iterator[Result]:
    images, seconds = Images.of(options), 0.5 if options.is_quick else 4.0
    into_memory(images.cache())
    cache = fb.open_cache(images.cache())
    works = {name: partial(rate_for, _batches(cache, dtype), BATCH, seconds) for name, dtype in DTYPES.items()}
    for work in works.values():
        work()
    for name, peer, beginning in (("Pillow, float32", PILLOW, "float32"), ("LitData", LITDATA, "")):
        try:
            works[name] = _best_of(peer, images, options, seconds, beginning)
        except PeerFailed as failure:
            print(failure, flush=True)
    rates = in_turn(works, options.rounds)
    size = f"{SIZE} x {SIZE}"
    if "LitData" in rates:
        yield compared(
            CASE, f"uint8, {size}", LITDATA.name, rates["uint8"], rates["LitData"], unit="images/s",
            equal="same canvases, written from ours", at_least=1.0,
        )  # fmt: skip
    yield compared(
        CASE, f"float32, normalized, {size}", PILLOW.name, rates["float32, normalized"], rates["Pillow, float32"],
        unit="images/s", equal="same shapes and range", at_least=6.0,
    )  # fmt: skip


def _batches(cache: fb.Cache, dtype: torch.dtype) -> Iterator[object]:
    normalize = "imagenet" if dtype.is_floating_point else None
    collate = ImageBatch(cache, dtype=dtype, normalize=normalize, tags=None)
    loader = Loader(cache, global_batch_size=BATCH, seed=0, collate=collate, threads=2)
    return forever(lambda: iter(loader))


def _best_of(peer: Peer, images: Images, options: Options, seconds: float, beginning: str) -> Callable[[], float]:
    """A call that times the fastest configuration of a peer in a fresh process."""
    data = images.written_by(peer) if peer.packages else images.files()
    into_memory(data)
    everything = [
        reading
        for reading in readings(peer, options.environments, data, seconds)
        if reading.configuration.startswith(beginning)
    ]
    best = max(everything, key=lambda reading: reading.rows_per_second)
    return lambda: readings(peer, options.environments, data, seconds, best.configuration)[0].rows_per_second
