"""A hub on loopback that answers every request after 20 ms: planning by footers, and the transfer of shards.

`python -m benchmarks.hub_speed` serves made-up shards from a separate process. The bare download requests the same
files with the same HTTP client and writes them; ours also hashes, locks and checks them. Both use two threads.
"""

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path

import httpx2
import numpy as np
import pyarrow
import pyarrow.parquet
from tests.hub.server import HubServer

from benchmarks.measure import Comparison
from forebay.hub import HubFile, Repository, acquire
from forebay.sources import hub_datasets
from forebay.sources.hub_datasets import HubSource, hub

NAME = "org/set"
LATENCY = 0.02
SHARDS, SHARD_BYTES, FOOTERS = 12, 24 << 20, 64
THREADS, ROUNDS = 2, 3


class LateHub(HubServer):
    """Answers after a while, and hashes each file once."""

    def answer(self, path: str, query: object) -> "tuple[int, dict[str, str], bytes]":
        time.sleep(LATENCY)
        return super().answer(path, query)  # type: ignore[arg-type]

    def _answer_file(self, kind: str, name: str, revision: str, path: str) -> "tuple[int, dict[str, str], bytes]":
        _, files = self._find(kind, name, revision)
        return (200, {"ETag": f'"{path}"'}, files[path]) if path in files else (404, {}, b"")


def serve() -> None:
    large = {f"data/train-{at:05d}.parquet": _shard(at, SHARD_BYTES) for at in range(SHARDS)}
    small = {f"data/test-{at:05d}.parquet": _shard(at, 1 << 16) for at in range(FOOTERS)}
    with LateHub() as server:
        server.add(NAME, large | small)
        print(server.address, flush=True)
        sys.stdin.read()


def _shard(seed: int, size: int) -> bytes:
    """Text that does not compress, in rows of a kilobyte."""
    letters = np.random.default_rng(seed).integers(97, 123, size, np.uint8).tobytes().decode()
    table = pyarrow.table({"text": [letters[at : at + 1000] for at in range(0, size, 1000)]})
    out = BytesIO()
    pyarrow.parquet.write_table(table, out, compression="none", use_dictionary=False)
    return out.getvalue()


def measure_planning(address: str) -> None:
    def planned(at_once: int) -> float:
        hub_datasets._FOOTERS_AT_ONCE = at_once
        hub_datasets._footers.cache_clear()
        source = hub(NAME, split="test", endpoint=address)
        shutil.rmtree(source.repository.place("footers"), ignore_errors=True)  # of an earlier run
        files = source.files()
        started = time.perf_counter()
        assert all(list(source.cuts(file, 0, 1000, 1000)) for file in files)
        return time.perf_counter() - started

    usual = hub_datasets._FOOTERS_AT_ONCE
    one, many = planned(1), planned(usual)
    print(Comparison(f"hub: footers, {usual} at once / one after the other", many, one, FOOTERS, "shards", 8.0))


def measure_transfer(address: str) -> None:
    source = hub(NAME, split="train", endpoint=address)
    urls = [source.repository.url(source.commit, file.path) for file in source.files()]
    amount = sum(file.size for file in source.files()) / 1e6
    best: dict[str, float] = {}
    for _ in range(ROUNDS):
        for name, take in (("bare", _bare(urls)), ("ours", _ours(source))):
            with tempfile.TemporaryDirectory() as folder:
                started = time.perf_counter()
                with ThreadPoolExecutor(THREADS) as pool:
                    list(pool.map(take, range(SHARDS), [folder] * SHARDS))
                seconds = time.perf_counter() - started
            best[name] = min(seconds, best.get(name, seconds))
    print(Comparison("hub: shards into the spool / bare download", best["ours"], best["bare"], amount, "MB", 0.8))


def _bare(urls: list[str]) -> Callable[[int, str], None]:
    client = httpx2.Client()  # ours, too, keeps its connections

    def take(at: int, folder: str) -> None:
        with client.stream("GET", urls[at]) as response, open(f"{folder}/{at}", "wb") as out:
            for piece in response.iter_raw():
                out.write(piece)

    return take


def _ours(source: HubSource) -> Callable[[int, str], None]:
    repository: Repository = source.repository
    shards = [file for file in repository.listing(source.commit).files if "train" in file.path]

    def take(at: int, folder: str) -> None:
        spooled = acquire(HubFile(repository, source.commit, shards[at]), folder)
        assert Path(spooled.path).stat().st_size == shards[at].size
        spooled.release()

    return take


def main() -> None:
    if sys.argv[1:] == ["serve"]:
        return serve()
    command = [sys.executable, "-m", "benchmarks.hub_speed", "serve"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stdin is not None
        address = server.stdout.readline().strip()
        measure_planning(address)
        measure_transfer(address)
        server.stdin.close()


if __name__ == "__main__":
    main()
