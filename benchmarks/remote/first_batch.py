"""The first batch from a bucket: an S3 server on loopback behind 20 ms of latency and a line of 60 MB/s."""

import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import obstore
from obstore.store import S3Store
from tests.helpers.fault_proxy import Fault, FaultProxy
from tests.remote.servers import request, s3_environment, s3_server

import forebay as fb
from benchmarks.lib.number_source import NoiseRecipe, NumberSource
from benchmarks.lib.options import Options
from benchmarks.lib.result import Result

CASE = "remote.first_batch"
LATENCY, BANDWIDTH = 0.02, 60e6
CHUNK_ROWS = 1024  # of 2,048 uint16 tokens: 4 MiB


def measure(options: Options) -> Iterator[Result]:
    rows = CHUNK_ROWS * (8 if options.is_quick else 57)
    root = options.folder / "for-a-bucket"
    shutil.rmtree(root, ignore_errors=True)
    fb.build(root, NumberSource(rows), NoiseRecipe(width=2048, chunk_rows=CHUNK_ROWS), progress=False)
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        calls, theirs = context.Pipe()
        server = context.Process(target=serve, args=(folder, theirs))
        server.start()
        url = calls.recv()
        try:
            os.environ.update(s3_environment(url))
            megabytes = upload(root) / 1e6
            seconds = [in_process("s3://bench/cache") for _ in range(options.rounds)]
        finally:
            calls.send("stop")
            server.join()
    work = f"first batch of 32 rows from a bucket of {megabytes:.0f} MB, fresh process, empty tier"
    yield Result(case=CASE, work=f"{work}: median", unit="s", ours=statistics.median(seconds), at_most=3.0)
    yield Result(case=CASE, work=f"{work}: worst", unit="s", ours=max(seconds))


def serve(folder: str, calls: Connection) -> None:
    with s3_server(folder) as server, FaultProxy(server, [Fault("latency", seconds=LATENCY)], BANDWIDTH) as line:
        request("PUT", f"{server}/bench")
        calls.send(line.url)
        calls.recv()


def upload(folder: Path) -> int:
    """Copy a folder into the bucket; returns its bytes."""
    store, size = S3Store("bench", prefix="cache"), 0
    for path in sorted(each for each in folder.rglob("*") if each.is_file()):
        obstore.put(store, path.relative_to(folder).as_posix(), path.read_bytes(), use_multipart=False)
        size += path.stat().st_size
    return size


def in_process(url: str) -> float:
    command = [sys.executable, "-m", "benchmarks.remote.first_batch", url]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return float(json.loads(run.stdout.splitlines()[-1]))


def first_batch(url: str) -> float:
    """Seconds from opening the cache to the first batch; imports are not counted."""
    from forebay.torch import Loader, StoredBatch  # noqa: PLC0415 - the parent process does not need torch

    with tempfile.TemporaryDirectory() as tier:
        started = time.perf_counter()
        cache = fb.open_cache(url, tier=tier)
        loader = Loader(cache, global_batch_size=32, seed=0, collate=StoredBatch(cache, ["noise"]))
        next(iter(loader))
        return time.perf_counter() - started


if __name__ == "__main__":
    print(first_batch(sys.argv[1]))
