"""Reading and checking bytes: `cache.read` next to one `numpy.memmap`, `verify` next to `sha256sum`."""

import os
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

import forebay as fb
from benchmarks.lib.files import into_memory, prepared
from benchmarks.lib.number_source import NoiseRecipe, NumberSource
from benchmarks.lib.options import Options
from benchmarks.lib.result import Result, compared
from benchmarks.lib.timing import in_turn, rate_of

CASE = "read.rows"
MIB = 1 << 20
WIDTH = 2048


def measure(options: Options) -> Iterator[Result]:
    rows = 16_384 if options.is_quick else 262_144
    recipe = NoiseRecipe(width=WIDTH, chunk_rows=4096)
    root = prepared(
        options.folder / f"rows-{rows}", fb.fingerprint(recipe), lambda root: fb.build(root, NumberSource(rows), recipe)
    )
    into_memory(root)
    cache, plain = fb.open_cache(root), _as_one_file(root, options.folder / f"rows-{rows}.plain")
    order = np.random.default_rng(0).permutation(rows)
    mib = rows * WIDTH * 2 / MIB
    for size in (32, 256):
        batches = np.split(order, range(size, rows, size))
        works = {
            "ours": lambda batches=batches: rate_of(lambda: _read(lambda one: cache.read(one), batches), mib),
            "theirs": lambda batches=batches: rate_of(lambda: _read(plain.__getitem__, batches), mib),
            "first": lambda batches=batches: rate_of(lambda: _read(fb.open_cache(root).read, batches), mib),
        }
        for work in works.values():
            work()
        rates = in_turn(works, options.rounds)
        what = f"read rows of 4 KiB, {size} at a time"
        yield compared(
            CASE, what, "numpy.memmap", rates["ours"], rates["theirs"], unit="MiB/s", equal="same rows", at_least=0.7
        )
        yield compared(
            CASE,
            f"{what}, first epoch, which checks",
            "numpy.memmap",
            rates["first"],
            rates["theirs"],
            unit="MiB/s",
            equal="same rows",
        )
    yield verify_against_sha256sum(root, rows, options.rounds)


def verify_against_sha256sum(root: Path, rows: int, rounds: int) -> Result:
    files = sorted(root.glob("layers/*/*.safetensors"))
    mib, threads = sum(file.stat().st_size for file in files) / MIB, os.cpu_count() or 1

    def theirs() -> None:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda part: subprocess.run(["sha256sum", *part], stdout=subprocess.DEVNULL, check=True),
                          [files[at::threads] for at in range(threads)]))  # fmt: skip

    works = {
        "ours": lambda: rate_of(lambda: fb.verify(root, source=NumberSource(rows)), mib),
        "theirs": lambda: rate_of(theirs, mib),
    }
    rates = in_turn(works, rounds)
    return compared(
        CASE, f"verify {len(files)} chunks", f"sha256sum, {threads} processes", rates["ours"], rates["theirs"],
        unit="MiB/s", equal="same files", at_least=0.9,
    )  # fmt: skip


def _read(read: Callable[[np.ndarray], object], batches: list[np.ndarray]) -> None:
    for batch in batches:
        read(batch)


def _as_one_file(root: Path, path: Path) -> np.ndarray:
    with open(path, "wb") as file:
        for columns in fb.open_cache(root).chunks():
            file.write(columns["noise"].tobytes())
    return np.memmap(path, np.uint16, "r").reshape(-1, WIDTH)
