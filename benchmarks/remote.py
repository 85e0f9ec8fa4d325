"""Training from a bucket, against bare GETs, a local cache, LitData and MosaicML Streaming.

    python -m benchmarks.remote [--megabytes 240] [--bandwidth 60] [--environments DIR] [--warm]

An S3 server on loopback (ministack) behind a proxy, both in a process apart, that answers every request after 20 ms and
sends all bodies over one line of the given bandwidth in MB/s. Rows of 2048 tokens in chunks of 4 MiB, the same rows and
the same size of chunk for everybody; batches of 32 rows of int64 tokens. Every timed epoch is a fresh process, timed
from after its imports.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import ClassVar

import msgspec
import numpy as np
import obstore
import torch
from obstore.store import S3Store
from tests.remote.servers import request, s3_environment, s3_server

import forebay as fb
from benchmarks.loader_peers import SCRIPTS, Peer, PeerFailed, environment, script
from benchmarks.numbers import NoiseRecipe, NumberSource
from forebay.cache.catalog import load_generation
from forebay.feeding.chunk_ahead import THREADS
from forebay.feeding.stream import REMOTE_CHUNKS, Policy, suitable_window
from forebay.format import layout
from forebay.format.chunk import EncodedChunk, encode_chunk
from forebay.format.generation import ChunkTable
from forebay.store import LocalStore, open_store
from forebay.testing.faults import Fault, FaultProxy
from forebay.torch import Loader

LENGTH, BATCH, CHUNK = 2048, 32, 4 << 20
LATENCY = 0.02
COUNTED_LATENCY = 0.5  # where requests are counted: those that do not wait for each other overlap, on any machine
MANY = 100_000
PEERS = (
    Peer("LitData 0.2.76", "remote_litdata.py", ("litdata==0.2.76", "boto3"), home="peer_litdata"),
    Peer("MosaicML Streaming 0.13.0", "remote_mosaic.py", ("mosaicml-streaming==0.13.0",), home="peer_mosaic"),
)
WORKERS = (0, 2)
PEER_SECONDS = 30
WARM_TURNS = 9  # processes differ by a tenth, whatever they read
WARM_EPOCHS = 12  # of a process that measures a warm tier: the first, and the mean of the others


class PlainRecipe(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of a plain file."""

    kind: ClassVar[str] = "plain"
    revision: ClassVar[int] = 1
    path: str

    def columns(self) -> tuple[fb.Column, ...]:
        return (fb.Column(name="tokens", dtype="uint16", shape=(LENGTH,)),)

    def chunk_target(self) -> fb.ChunkTarget:
        return fb.ChunkTarget(rows=CHUNK // (2 * LENGTH))

    def make(self, samples: Iterable[fb.Sample]) -> fb.Rows:
        rows = np.memmap(self.path, np.uint16, "r").reshape(-1, LENGTH)
        return fb.Rows({"tokens": rows[[sample.data for sample in samples]]})


def serve(folder: str, bandwidth: float, calls: Connection) -> None:
    """Run the server and its line; answer calls about them."""
    with s3_server(folder) as server, FaultProxy(server) as fast:
        faults = [Fault("latency", seconds=LATENCY)]
        with (
            FaultProxy(server, faults, bytes_per_second=bandwidth) as line,
            FaultProxy(server, [Fault("latency", seconds=COUNTED_LATENCY)]) as counted,
        ):
            request("PUT", f"{server}/bench")
            calls.send((fast.url, line.url, counted.url))
            while (call := calls.recv()) != "stop":
                if call == "reset":
                    line.reset_counts()
                    counted.reset_counts()
                calls.send((line.bytes_sent, list(counted.spans)))


class Line:
    """The server process, as the benchmark sees it."""

    def __init__(self, folder: str, bandwidth: float) -> None:
        context = multiprocessing.get_context("spawn")
        self._calls, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(folder, bandwidth, theirs))
        self._process.start()
        self.fast_url, self.url, self.counted_url = self._calls.recv()

    def ask(self, what: str) -> tuple[int, list[tuple[float, float, str]]]:
        self._calls.send(what)
        found: tuple[int, list[tuple[float, float, str]]] = self._calls.recv()
        return found

    def stop(self) -> None:
        self._calls.send("stop")
        self._process.join()


def first_chunks(url: str) -> set[str]:
    """The keys of the chunks that the first batch of `epoch` has rows of."""
    cache = fb.open_cache(url)
    loader = Loader(
        cache, global_batch_size=BATCH, columns=[cache.default_columns[0]], collate="stored", shuffle="window"
    )
    chunks = cache.chunk_numbers[cache.chunk_positions(loader.stream.locate(0, np.arange(BATCH)).rows)]
    prefix = url.removeprefix("s3://bench/")
    return {f"{prefix}/{layout.chunk(cache.layers[0], chunk)}" for chunk in np.unique(chunks).tolist()}


def round_trips(spans: list[tuple[float, float, str]]) -> int:
    """The most requests of which each began after the one before it had ended."""
    count, free = 0, 0.0
    for came, answered, _ in sorted(spans, key=lambda span: span[1]):
        if came >= free:
            count, free = count + 1, answered
    return count


def epoch(url: str, folder: str, limit: int, batches: int, epochs: int = 1) -> dict[str, float]:
    """One epoch of forebay's in this process, or some batches of it; or several epochs of the same rows."""
    torch.set_num_threads(1)  # else its threads wait for each other, which other work makes long
    started, first, first_at, cpu = time.perf_counter(), 0.0, 0.0, 0.0
    cache = fb.open_cache(url, tier=folder, tier_bytes=limit or None) if folder else fb.open_cache(url)
    column = cache.default_columns[0]
    growth: Policy = "epoch" if epochs == 1 else "pinned"  # one epoch fetches nothing of the next
    window = replace(suitable_window(cache, [column]), chunks=REMOTE_CHUNKS)  # also of a local cache: the same order
    loader = Loader(
        cache,
        global_batch_size=BATCH,
        columns=[column],
        collate="stored",
        shuffle="window",
        window=window,
        growth=growth,
    )
    for number, batch in enumerate(loader, 1):
        if column == "tokens":
            batch[column].to(torch.int64)
        if number == 1:
            first, first_at, cpu = time.perf_counter() - started, time.monotonic(), time.process_time()
        if number == batches:
            break
    spent = time.perf_counter() - started
    cpu = time.process_time() - cpu
    found = {"first": first, "first_at": first_at, "seconds": spent, "after": spent - first, "cpu": cpu}
    wall, processor = time.perf_counter(), time.process_time()
    for _ in range(epochs - 1):
        for batch in loader:
            batch[column].to(torch.int64)
    share = max(1, epochs - 1)
    later = {"later": (time.perf_counter() - wall) / share, "later_cpu": (time.process_time() - processor) / share}
    return found | later


def in_process(url: str, folder: str = "", limit: int = 0, batches: int = -1, epochs: int = 1) -> dict[str, float]:
    numbers = [str(number) for number in (limit, batches, epochs)]
    command = [sys.executable, "-m", "benchmarks.remote", "--epoch", url, folder, *numbers]
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    if said.returncode:
        raise SystemExit(said.stderr)
    found: dict[str, float] = json.loads(said.stdout.splitlines()[-1])
    return found


def bare_gets(bucket: str, keys: list[str]) -> float:
    """Seconds to get objects with as many threads as forebay fetches with, and nothing else."""
    store = S3Store("bench", prefix=bucket)
    started = time.perf_counter()
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda key: len(obstore.get(store, key).bytes()), keys))
    return time.perf_counter() - started


def upload(folder: Path, prefix: str) -> int:
    """Copy a folder into the bucket; returns its bytes."""
    store, size = S3Store("bench", prefix=prefix), 0
    for path in sorted(each for each in folder.rglob("*") if each.is_file()):
        obstore.put(store, path.relative_to(folder).as_posix(), path.read_bytes(), use_multipart=False)
        size += path.stat().st_size
    return size


def upload_many(folder: Path) -> None:
    """A cache of very many small chunks: its index, and those chunks that the first batches need."""
    root, recipe = folder / "many", NoiseRecipe(width=8, chunk_rows=8)
    fb.build(root, NumberSource(8), recipe, workers=0)
    store = LocalStore(str(root))
    newest, fingerprint = load_generation(store), fb.fingerprint(recipe)

    def encoded(number: int) -> EncodedChunk:
        rows = {"noise": np.full((8, 8), number % 65_536, np.uint16)}
        return encode_chunk(rows, recipe.columns(), layer="noise", chunk=number, fingerprint=fingerprint, samples=8)

    table = ChunkTable.of(each.record(each.sha256()) for each in map(encoded, range(MANY)))
    grown = replace(newest, number=newest.number + 1, layers={"noise": table})
    store.create(layout.generation(grown.number), grown.encode(None))
    upload(root, "many")
    cache = fb.open_cache("s3://bench/many")
    loader = Loader(cache, global_batch_size=BATCH, shuffle="window", fetch_ahead=0)
    rows = loader.stream.locate(0, np.arange(200 * BATCH)).rows
    bucket = S3Store("bench", prefix="many")
    with ThreadPoolExecutor(8) as pool:
        for chunk in np.unique(cache.chunk_positions(rows)).tolist():
            data = b"".join(encoded(chunk).buffers)
            pool.submit(obstore.put, bucket, layout.chunk("noise", chunk), data, use_multipart=False)


def write_rows(folder: Path, rows: int) -> Path:
    """A plain file of rows, for everybody."""
    folder.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(0).integers(0, 50_257, (rows, LENGTH), np.uint16)
    (folder / "tokens").write_bytes(noise.tobytes())
    return folder / "tokens"


@dataclass
class Run:
    """Where everything is, and what was found, as lines of a table."""

    folder: Path
    line: Line
    environments: Path
    size: int = 0  # bytes of all chunks
    found: list[str] = field(default_factory=list)

    def add(self, what: str, value: str, goal: str = "", is_met: bool = True) -> None:
        self.found.append(f"| {what} | {value} | {goal}{'' if is_met else ', missed'} |")
        print(self.found[-1], flush=True)

    def empty(self, name: str) -> str:
        shutil.rmtree(self.folder / name, ignore_errors=True)
        return str(self.folder / name)

    def peer_epoch(self, peer: Peer, folder: str, limit: int, workers: int) -> dict[str, float]:
        command = [environment(peer, self.environments), "-X", "faulthandler", SCRIPTS / peer.script, "epoch",
                   f"s3://bench/{peer.script[:-3]}", folder, limit, workers]  # fmt: skip
        plain = {**os.environ, "PYTHONPATH": ""}
        process = subprocess.Popen([str(word) for word in command], env=plain, stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE, text=True, start_new_session=True)  # fmt: skip
        try:
            out, err = process.communicate(timeout=PEER_SECONDS)
        except subprocess.TimeoutExpired as error:
            process.send_signal(signal.SIGABRT)  # it says where it is
            time.sleep(1)
            os.killpg(process.pid, signal.SIGKILL)
            err = process.communicate()[1]
            raise PeerFailed(peer.name, f"an epoch did not end in {PEER_SECONDS} s {place_in(err)}") from error
        if process.returncode:
            raise PeerFailed(peer.name, last_error(err))
        found: dict[str, float] = json.loads(out.splitlines()[-1])
        return found


def last_error(said: str) -> str:
    """The last error that a process printed, on one line; else its last line."""
    lines = [line.strip() for line in said.splitlines() if line.strip()] or ["nothing"]
    return next((line for line in reversed(lines) if re.match(r"[\w.]*(Error|Exception)\b", line)), lines[-1])


def place_in(said: str) -> str:
    """Where the main thread was, after what `faulthandler` printed, and the last error before that."""
    before, _, threads = said.partition("Fatal Python error")
    frames = re.findall(r'File "[^"]*?([^/"]+)", line (\d+) in (\S+)', threads.rpartition("hread 0x")[2])
    places = ", called by ".join(f"{name} ({file}:{line})" for file, line, name in frames[:2])
    error = last_error(before)
    return f"(in {places or 'no place that it named'}{'' if error == 'nothing' else f'; it had said: {error}'})"


def prepare(run: Run, megabytes: int) -> Path:
    """Write the rows and put a cache of them into the bucket; returns the plain rows."""
    rows = megabytes * 1_000_000 // CHUNK * (CHUNK // (2 * LENGTH)) + 1
    plain, root = write_rows(run.folder / "plain", rows), run.folder / "cache"
    fb.build(root, NumberSource(rows), PlainRecipe(path=str(plain)), workers=0)
    os.environ.update(s3_environment(run.line.fast_url))
    upload(root, "cache")
    run.size = sum(path.stat().st_size for path in (root / "layers" / "plain").glob("0*"))
    return plain


def prepare_peers(run: Run, plain: Path) -> list[Peer]:
    """Put the cache of many chunks, and the rows in every other format, into the bucket; returns who could."""
    upload_many(run.folder)
    able = []
    for peer in PEERS:
        written = run.folder / peer.script[:-3]
        try:
            script(peer, environment(peer, run.environments), "write", plain, written)
        except PeerFailed as error:
            print(error)
            continue
        upload(written, peer.script[:-3])
        able.append(peer)
    return able


def measure(run: Run, peers: list[Peer]) -> None:
    url = "s3://bench/cache"
    many = measure_first(run, "s3://bench/many")
    run.add(f"first batch of a cache of {MANY:,} chunks", f"{many['first']:.2f} s", "< 1 s", many["first"] < 1)
    run.add("the same, requests one after the other", f"{many['trips']:.0f}", "≤ 4", many["trips"] <= 4)
    ours = measure_first(run, url)
    run.add("first batch of the cache of the next lines", f"{ours['first']:.2f} s, {ours['trips']:.0f} round trips")

    keys = [entry.key for entry in open_store(url).entries("layers/") if layout.parse_chunk(entry.key)]
    bare, cold = [], []
    for _ in range(2):
        bare.append(bare_gets("cache", keys))
        cold.append(in_process(url, run.empty("tier"))["seconds"])
    ratio = min(bare) / min(cold)
    rates = f"{run.size / min(cold) / 1e6:.1f} and {run.size / min(bare) / 1e6:.1f} MB/s"
    run.add(f"cold epoch / bare obstore GETs ({rates})", f"{ratio:.2f}", "≥ 0.8", ratio >= 0.8)

    half, kept = run.size // 2, run.empty("half")
    in_process(url, kept, half)
    run.line.ask("reset")
    second = in_process(url, kept, half)["seconds"]
    share = run.line.ask("get")[0] / run.size
    is_met = 0.48 <= 1 - share <= 0.52
    run.add("tier of half the data: hit rate of the second epoch", f"{1 - share:.1%}", "50 ± 2 %", is_met)
    print(f"   second epoch: {second:.2f} s")

    for peer in peers:
        measure_peer(run, peer, ours["first"], min(cold), share)
    measure_warm(run, url)


def measure_first(run: Run, url: str) -> dict[str, float]:
    """The first batch of a fresh process with an empty tier: best of two, and its round trips."""
    best = min((in_process(url, run.empty("first"), 0, 1) for _ in range(2)), key=lambda one: one["first"])
    return best | {"trips": count_first(run, url)}


def count_first(run: Run, url: str) -> int:
    """The round trips until the first batch; chunks of later batches do not count."""
    needed = first_chunks(url)
    os.environ.update(s3_environment(run.line.counted_url))
    run.line.ask("reset")
    one = in_process(url, run.empty("first"), 0, 1)
    os.environ.update(s3_environment(run.line.url))
    ended = [span for span in run.line.ask("get")[1] if span[1] <= one["first_at"]]
    return round_trips([span for span in ended if span[2] in needed or "/layers/" not in span[2]])


def measure_peer(run: Run, peer: Peer, first: float, cold: float, share: float) -> None:
    firsts, colds, shares, failures = [], [], [], []
    for workers in WORKERS:
        try:
            one = run.peer_epoch(peer, run.empty("peer"), 0, workers)
            firsts.append(one["first"])
            colds.append(one["seconds"])
        except PeerFailed as error:
            failures.append(f"{workers} workers, without a limit: {error.said}")
            continue
        kept, at = run.empty("peer-half"), "first"
        try:
            run.peer_epoch(peer, kept, run.size // 2, workers)
            run.line.ask("reset")
            at = "second"
            run.peer_epoch(peer, kept, run.size // 2, workers)
            shares.append(run.line.ask("get")[0] / run.size)
        except PeerFailed as error:
            failures.append(f"{workers} workers, half kept, {at} epoch: {error.said}")
    for failure in failures:
        run.add(f"{peer.name} failed", failure)
    if not firsts:
        return
    quicker, faster = min(firsts) / first, min(colds) / cold
    run.add(f"first batch of {peer.name} ({min(firsts):.2f} s) / ours", f"{quicker:.1f}", "≥ 3", quicker >= 3)
    run.add(f"cold epoch of {peer.name} ({min(colds):.2f} s) / ours", f"{faster:.2f}", "≥ 1", faster >= 1)
    if shares:
        least = min(shares)
        run.add(f"second epoch, half kept: bytes fetched, ours and {peer.name}", f"{share:.0%}, {least:.0%}", "fewer",
                share <= least)  # fmt: skip


def with_files_of(tier: str, cache: Path, copy: Path) -> Path:
    """A copy of a cache whose chunks are the files of a tier, by other names.

    Two files of equal bytes are read up to a tenth faster or slower, for as long as they stay in the same memory.
    """
    kept = {path.name: path for path in Path(tier).glob("caches/*/chunks/*")}
    shutil.copytree(cache, copy)
    for path in (copy / "layers" / "plain").glob("0*"):
        file = kept[hashlib.sha256(path.read_bytes()).hexdigest()]
        path.unlink()
        os.link(file, path)
    return copy


def measure_warm(run: Run, url: str) -> None:
    """Epochs of a warm tier and of a local cache of the same files, taking turns."""
    tier = run.empty("warm")
    fb.warm_cache(url, tier)
    same = with_files_of(tier, run.folder / "cache", Path(run.empty("same")))
    local, warm = [], []
    for _ in range(WARM_TURNS):
        local.append(in_process(str(same), epochs=WARM_EPOCHS))
        warm.append(in_process(url, tier, epochs=WARM_EPOCHS))
    first, later = "first epoch of a process, after its first batch", f"mean of the {WARM_EPOCHS - 1} epochs after it"
    for name, what in (
        ("after", f"{first}, seconds"), ("cpu", f"{first}, processor time"),
        ("later", f"{later}, seconds"), ("later_cpu", f"{later}, processor time"),
    ):  # fmt: skip
        here, there = (statistics.median(one[name] for one in some) for some in (local, warm))
        rates = f"{there:.3f} and {here:.3f}"
        run.add(f"warm tier / local cache, {what} ({rates})", f"{here / there:.2f}", "≥ 0.95", here / there >= 0.95)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=240)
    parser.add_argument("--bandwidth", type=float, default=60, help="MB/s")
    parser.add_argument("--environments", type=Path, default=Path(tempfile.gettempdir()) / "forebay-peers")
    parser.add_argument("--warm", action="store_true", help="Measure the last line only: a warm tier.")
    parser.add_argument("--epoch", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.epoch:
        url, folder, *numbers = options.epoch
        print(json.dumps(epoch(url, folder, *map(int, numbers))))
        return
    with tempfile.TemporaryDirectory() as folder:
        line = Line(folder, options.bandwidth * 1e6)
        try:
            run = Run(Path(folder), line, options.environments)
            plain = prepare(run, options.megabytes)
            peers = [] if options.warm else prepare_peers(run, plain)
            os.environ.update(s3_environment(line.url) | {"S3_ENDPOINT_URL": line.url})
            print(f"{run.size / 1e6:,.0f} MB of chunks, {options.bandwidth:g} MB/s, {LATENCY * 1000:g} ms\n")
            print("| measured | found | goal |\n|---|---:|---:|", flush=True)
            if options.warm:
                measure_warm(run, "s3://bench/cache")
            else:
                measure(run, peers)
        finally:
            line.stop()


if __name__ == "__main__":
    main()
