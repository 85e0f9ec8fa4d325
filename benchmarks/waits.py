"""What a loader's statistics cost, and how right they are: `python -m benchmarks.waits`.

Cost: the seconds that measuring adds to a handoff of batches, alone in a loop, as a share of the seconds that a handoff
takes in an epoch of a local cache, where the training step does nothing. Right: a folder that answers every read of a
chunk after 0.2 s, with nothing fetched ahead; then with training steps of 5 ms, while one chunk is fetched ahead. What
was injected, or waited outside the loader after the first batch, is compared with what the statistics say.
"""

import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.store.far_stores import FarFolder
from tests.token_caches import token_cache

import forebay as fb
from forebay.feeding.statistics import Batch, Handoff, HandoffMeter, timed
from forebay.format import layout
from forebay.store import LocalStore
from forebay.store.base import Expected
from forebay.store.tiered import TieredStore
from forebay.torch import Loader

DELAY, STEP = 0.2, 0.005
ROUNDS = 7


class LateFolder(LocalStore):
    """Opens chunks late, and counts by how much. It is local: nothing is fetched ahead."""

    injected = 0.0

    def view(self, key: str, *, expect: Expected | None = None) -> memoryview:
        if layout.parse_chunk(key):
            started = time.perf_counter()
            time.sleep(DELAY)
            self.injected += time.perf_counter() - started
        return super().view(key, expect=expect)


class LateFar(FarFolder):
    """Sends chunks late."""

    def sent(self, key: str, start: int, value: bytes) -> bytes:
        if layout.parse_chunk(key):
            time.sleep(DELAY)
        return value


def seconds_per_handoff(count: int = 100_000) -> float:
    """What measuring adds to one handoff: the best of some rounds, measured and not."""

    def groups() -> Iterator[list[Batch]]:
        return iter([[]] * count)

    def plain() -> Iterator[Handoff]:
        return (Handoff(group, 0.0, []) for group in groups())

    def spent(handoffs: Iterator[Handoff]) -> float:
        started = time.perf_counter()
        for _ in handoffs:
            pass
        return time.perf_counter() - started

    measured = min(spent(HandoffMeter().waiting(timed(groups()))) for _ in range(ROUNDS))
    return (measured - min(spent(plain()) for _ in range(ROUNDS))) / count


class Counting(HandoffMeter):
    """A meter that counts handoffs."""

    handoffs = 0

    def waiting(self, handoffs: Iterator[Handoff]) -> Iterator[Handoff]:  # type: ignore[override]
        for handoff in super().waiting(handoffs):
            self.handoffs += 1
            yield handoff


def epoch_handoff_seconds(root: Path) -> float:
    """The seconds of a handoff in an epoch of nothing but reading: the median of some epochs after the first."""
    loader = Loader(fb.open_cache(root), global_batch_size=32)
    found = []
    for _ in range(ROUNDS + 1):
        loader._meter = meter = Counting()
        for _ in loader:
            pass
        found.append(meter.seconds / meter.handoffs)
    return statistics.median(found[1:])


def waits_one_by_one(root: Path, folder: Path) -> tuple[float, float]:
    """(injected, reported) seconds of waiting for chunks, where nothing is fetched ahead."""
    store = LateFolder(root)
    loader = Loader(
        fb.open_cache(store), global_batch_size=32, shuffle=None, threads=0, columns=["tokens"], collate="stored"
    )
    before = store.injected
    for _ in loader:
        pass
    return store.injected - before, loader.statistics().waited_tier


def waits_beside_steps(root: Path, folder: Path) -> tuple[float, float]:
    """(outside the loader, reported) seconds of waiting for batches, beside training steps."""
    cache = fb.open_cache(TieredStore(LocalStore(folder), LateFar(root), reserve_bytes=0))
    loader = Loader(cache, global_batch_size=32, shuffle=None, fetch_ahead=1)
    batches = iter(loader)
    next(batches)
    waited, before = 0.0, loader.statistics().waited
    while True:
        started = time.perf_counter()
        batch = next(batches, None)
        waited += time.perf_counter() - started
        if batch is None:
            return waited, loader.statistics().waited - before
        time.sleep(STEP)


def show(what: str, found: float, goal: float) -> None:
    print(f"| {what} | {found:.2%} | ≤ {goal:.1%}{'' if found <= goal else ', missed'} |")


def main() -> None:
    print("| measured | found | goal |\n|---|---:|---:|")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fast = token_cache(folder / "fast", 16_384, chunk_rows=4096, sequence_length=512, rows_per_block=64)
        added, whole = seconds_per_handoff(), epoch_handoff_seconds(fast)
        show(f"measuring a handoff ({added * 1e6:.2f} µs) / making it ({whole * 1e6:,.0f} µs)", added / whole, 0.005)
        slow = token_cache(folder / "slow", 4096, chunk_rows=256, sequence_length=64)
        for what, waits in (("injected delays", waits_one_by_one), ("waiting beside steps", waits_beside_steps)):
            true, reported = waits(slow, folder / what)
            show(f"{what} ({true:.2f} s), reported {reported:.2f} s: error", abs(reported / true - 1), 0.05)


if __name__ == "__main__":
    main()
