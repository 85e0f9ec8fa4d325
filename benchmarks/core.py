"""The storage core against the plain way of doing the same: write+fsync, numpy.memmap, hashlib.

Goals: writing chunks ≥ 0.6 × a plain write and fsync of the same bytes; random rows ≥ 0.7 × fancy indexing of one
memmap once blocks are checked, ≥ 0.4 × while they are being checked; verify ≥ 0.9 × SHA-256 of the same files, per
core; a generation of 100,000 chunks opens in < 1 s and < 150 MB.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

import forebay as fb
from benchmarks.measure import Comparison, compare
from benchmarks.numbers import NoiseRecipe, NumberSource
from forebay.building.chunk_maker import write_chunk
from forebay.format.chunk import encode_chunk
from forebay.store import LocalStore

MIB = 1024 * 1024


def main() -> None:
    with tempfile.TemporaryDirectory(dir=os.environ.get("FOREBAY_BENCH_DIR")) as folder:
        for comparison in (write_chunks(Path(folder)), *read_rows(Path(folder)), verify_files(Path(folder))):
            print(comparison, flush=True)
        open_many_chunks(Path(folder))


def write_chunks(folder: Path) -> Comparison:
    recipe = NoiseRecipe(width=2048, chunk_rows=16_384)
    rows = recipe.make(NumberSource(16_384).read(fb.Part(NumberSource(16_384).look("numbers"), 0, 16_384)))
    store = LocalStore(folder / "write")
    same = b"".join(_encode(rows, recipe).buffers)

    def ours() -> None:
        write_chunk(store, "noise", _encode(rows, recipe))

    def theirs() -> None:
        with open(folder / "plain", "wb", buffering=0) as file:
            file.write(same)
            os.fsync(file.fileno())

    def before() -> None:
        store.delete("layers/noise/000000.safetensors")
        (folder / "plain").unlink(missing_ok=True)

    name = f"write a chunk of {len(same) // MIB} MiB / write + fsync of the same bytes"
    return compare(name, ours, theirs, amount=len(same) / MIB, unit="MiB", goal=0.6, before=before)


def read_rows(folder: Path) -> list[Comparison]:
    found = []
    for width, rows, chunk_rows, sizes in ((2048, 262_144, 4096, (32, 1024, 256)), (262_144, 2048, 32, (16,))):
        root, one = folder / f"rows-{width}", folder / f"one-{width}"
        fb.build(root, NumberSource(rows), NoiseRecipe(width=width, chunk_rows=chunk_rows), workers=0)
        cache = fb.open_cache(root)
        whole = _as_one_file(cache, one, width)
        mib = len(cache) * width * 2 / MIB
        for size in sizes:
            order = np.random.default_rng(0).permutation(len(cache))
            batches = np.split(order, range(size, len(order), size))
            what = f"{width * 2 // 1024} KiB rows in batches of {size}"
            ours, theirs = _Epoch(partial(_read, cache), batches), _Epoch(whole.__getitem__, batches)
            found.append(compare(f"read {what} / memmap", ours, theirs, amount=mib, unit="MiB", goal=0.7))
        first, fresh = _FirstEpoch(root, batches), _FreshMemmap(one, width, batches)
        name = f"first, checking epoch of {what} / memmap"
        found.append(compare(name, first, theirs, amount=mib, unit="MiB", goal=0.4))
        found.append(compare(f"{name} opened afresh", first, fresh, amount=mib, unit="MiB", goal=0.4))
    return found


def _read(cache: fb.Cache, rows: np.ndarray) -> object:
    return cache.read(rows)["noise"]


class _Epoch:
    """All batches, once."""

    def __init__(self, read: object, batches: list[np.ndarray]) -> None:
        self._read, self._batches = read, batches

    def __call__(self) -> None:
        for batch in self._batches:
            self._read(batch)  # type: ignore[operator]


class _FirstEpoch:
    """All batches, once, from a cache that this process has not touched."""

    def __init__(self, root: Path, batches: list[np.ndarray]) -> None:
        self._root, self._batches = root, batches

    def __call__(self) -> None:
        cache = fb.open_cache(self._root)
        for batch in self._batches:
            cache.read(batch)


class _FreshMemmap:
    """All batches, once, from a memmap that was just opened."""

    def __init__(self, path: Path, width: int, batches: list[np.ndarray]) -> None:
        self._path, self._width, self._batches = path, width, batches

    def __call__(self) -> None:
        whole = np.memmap(self._path, np.uint16, "r").reshape(-1, self._width)
        for batch in self._batches:
            whole[batch]


def verify_files(folder: Path) -> Comparison:
    root = folder / "rows-2048"
    files = sorted((root / "layers" / "noise").glob("0*.safetensors"))
    size = sum(file.stat().st_size for file in files) / MIB

    def theirs() -> None:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda file: hashlib.sha256(file.read_bytes()).digest(), files))

    name = f"verify {len(files)} chunks / hashlib.sha256 of the same files, {os.cpu_count()} threads each"
    return compare(name, lambda: fb.verify(root), theirs, amount=size, unit="MiB", goal=0.9)


def open_many_chunks(folder: Path) -> None:
    root = folder / "many"
    subprocess.run([sys.executable, "-m", "benchmarks.many", "make", str(root)], check=True)
    subprocess.run([sys.executable, "-m", "benchmarks.many", "open", str(root)], check=True)


def _encode(rows: fb.Rows, recipe: NoiseRecipe) -> object:
    return encode_chunk(rows.columns, recipe.columns(), layer="noise", chunk=0, fingerprint="", samples=16_384)


def _as_one_file(cache: fb.Cache, path: Path, width: int) -> np.memmap:
    with open(path, "wb") as file:
        for columns in cache.chunks():
            file.write(columns["noise"].tobytes())
    return np.memmap(path, np.uint16, "r").reshape(-1, width)


if __name__ == "__main__":
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {time.strftime('%Y-%m-%d')}")
    main()
