"""Reading batches of images: against Pillow in a DataLoader, other formats that hold the same pixels, a bare copy."""

import itertools
import statistics
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

import forebay as fb
from benchmarks.image_data import BATCH, SIZE, Images
from benchmarks.loader_peers import Peer, PeerFailed, Reading, installed, peer_readings
from benchmarks.measure import Comparison, compare
from benchmarks.prepared import into_memory
from forebay.torch import ImageBatch, Loader
from forebay.torch.images.canvas import MaskPlace

THREADS = 2
ROUND_BATCHES = 20

Batches = Iterator[Mapping[str, Tensor]]

PILLOW = Peer("Pillow + DataLoader, two workers", "image_pillow.py", ())
PEERS = (
    Peer("LitData", "image_litdata.py", ("litdata",), home="peer_litdata"),
    Peer("MosaicML Streaming", "image_mosaic.py", ("mosaicml-streaming",), home="peer_mosaic"),
    Peer("WebDataset", "image_webdataset.py", ("webdataset", "torch"), home="peer_webdataset"),
)


def measure_reading(images: Images, environments: Path, seconds: float) -> None:
    into_memory(images.cache())
    cache = fb.open_cache(images.cache())
    ours = {
        "uint8": batches(cache, torch.uint8, "host"),
        "uint8, pixels alone": batches(cache, torch.uint8, None),
        "float32": batches(cache, torch.float32, "host"),
    }
    print(f"first, checking epoch, uint8: {_rate(ours['uint8'], len(cache) // BATCH):,.0f} images/s")
    print(bare_copy(ours["float32"]), flush=True)
    found = {PILLOW.name: _read(PILLOW, images.files(), environments, seconds)}
    rates = {name: [_rate(these)] for name, these in ours.items()}
    for peer in PEERS:
        found[peer.name] = _read(peer, _written(images, peer), environments, seconds)
        for name, these in ours.items():
            rates[name].append(_rate(these))
    _tell({name: statistics.median(those) for name, those in rates.items()}, found)


def batches(cache: fb.Cache, dtype: torch.dtype, masks: MaskPlace | None) -> Batches:
    """Shuffled, epoch after epoch: pixels with their boxes, and with pixel masks where the host makes them."""
    normalize = "imagenet" if dtype.is_floating_point else None
    collate = ImageBatch(cache, dtype=dtype, normalize=normalize, tags=None, masks=masks)
    loader = Loader(cache, global_batch_size=BATCH, collate=collate, threads=THREADS)
    while True:
        yield from loader


def bare_copy(floats: Batches) -> Comparison:
    """Normalised batches against one uint8 batch cast into one float buffer, again and again."""
    pixels = torch.randint(0, 256, (BATCH, 3, SIZE, SIZE), dtype=torch.uint8)
    out = torch.empty(pixels.shape)

    def theirs() -> None:
        for _ in range(ROUND_BATCHES):
            out.copy_(pixels)

    name = "normalised float32 / bare out.copy_(uint8)"
    amount = ROUND_BATCHES * BATCH
    return compare(name, lambda: _take(floats), theirs, amount=amount, unit="images", goal=0.3)


def _written(images: Images, peer: Peer) -> Path | None:
    try:
        return images.peer(peer)
    except PeerFailed as failure:
        print(failure, flush=True)
        return None


def _read(peer: Peer, written: Path | None, environments: Path, seconds: float) -> list[Reading]:
    """All configurations of a peer, printed; none where it does not run."""
    if written is None:
        return []
    try:
        found = list(peer_readings(peer, written, environments, seconds))
    except PeerFailed as failure:
        print(failure, flush=True)
        return []
    print(f"{peer.name} ({installed(peer, environments)})")
    print(*found, sep="\n", flush=True)
    return found


def _tell(rates: Mapping[str, float], found: Mapping[str, list[Reading]]) -> None:
    goals = {"uint8": 15.0, "uint8, pixels alone": 15.0, "float32": 6.0}
    for name, goal in goals.items():
        those = [reading for reading in found[PILLOW.name] if reading.configuration.startswith(name.split(",")[0])]
        _hold(f"{name} / {PILLOW.name}", rates[name], those, goal)
    for peer in PEERS:
        _hold(f"uint8 / {peer.name}", rates["uint8"], found[peer.name], 2.0)
        _hold(f"uint8, pixels alone / {peer.name}", rates["uint8, pixels alone"], found[peer.name], 1.0)


def _hold(name: str, rate: float, readings: list[Reading], goal: float) -> None:
    if readings:
        best = max(reading.rows_per_second for reading in readings)
        print(Comparison(name, 1 / rate, 1 / best, 1, "images", goal), flush=True)


def _rate(these: Batches, count: int = 4 * ROUND_BATCHES) -> float:
    started = time.perf_counter()
    _take(these, count)
    return count * BATCH / (time.perf_counter() - started)


def _take(these: Batches, count: int = ROUND_BATCHES) -> None:
    for _ in itertools.islice(these, count):
        pass
