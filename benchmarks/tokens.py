"""Text to packed tokens: how fast, how small, how full, in how much memory — against the bare work and named peers.

    python -m benchmarks.tokens [--text FOLDER] [--megabytes 500] [--rounds 3] [--peers FOLDER] [--without-peers]

The text is that of a folder of `.jsonl.gz` (MDN by default), as it is where a size is asked for, repeated with a
changing prefix per document where a rate is. Every timed run is a process of its own with one thread for
tokenizing; those that are compared take turns, and the best of each counts. Peers are timed on a smaller share of the
text, as a rate.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

import forebay as fb
from benchmarks.measure import Comparison
from benchmarks.tokens_corpus import MB, beginning, decompress, repeat, size, texts
from benchmarks.tokens_goal import Goal
from benchmarks.tokens_memory import worker_peak
from benchmarks.tokens_peers import peers_python, tiktoken_memmap, trl_packing, versions
from benchmarks.tokens_runs import run
from benchmarks.tokens_text import check_round_trip, document_lengths
from forebay.engine.base import THREADS
from forebay.tokens import pack_best_fit, split_documents

REPOSITORY = Path(__file__).resolve().parent.parent
ENVIRONMENT = {**os.environ, **dict.fromkeys(THREADS, "1"), "PYTHONPATH": str(REPOSITORY)}
# sequence length, rows per chunk (None: the default), most padding in per cent
PADDING = ((512, None, 0.35), (512, 32_000, 0.20), (2048, None, 0.10), (8192, None, 0.15))
WINDOW = 10_000  # documents packed at once

Run = Callable[[], dict[str, Any]]


@dataclass(frozen=True)
class Peer:
    run: Callable[[Path, list[Path], dict[str, str]], dict[str, Any]]
    megabytes: int  # of the text that it is timed on: some five seconds
    goal: float


PEERS = {
    "datasets.map, HF tokenizer, TRL pack_dataset": Peer(trl_packing, 12, 20),
    "tiktoken + numpy.memmap": Peer(tiktoken_memmap, 48, 4),
}


def main(arguments: Sequence[str] = ()) -> None:
    options = _parser().parse_args(arguments)
    if not list(options.text.glob("*.jsonl*")):
        print(f"there are no .jsonl or .jsonl.gz files in '{options.text}'; give a folder of them with --text")
        return
    with tempfile.TemporaryDirectory(dir=os.environ.get("FOREBAY_BENCH_DIR")) as folder:
        bench = Bench(Path(folder), options)
        for part in (bench.sizes, bench.estimates, bench.rates, bench.memory):
            for line in part():
                print(line, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tokens", description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, default=REPOSITORY.parent / "shared" / "data" / "text")
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers", type=Path, default=Path.home() / ".cache" / "forebay-benchmarks" / "peers")
    parser.add_argument("--without-peers", action="store_true")
    return parser


@dataclass
class Bench:
    """A scratch folder with the text in it, and what is measured there."""

    folder: Path
    options: argparse.Namespace

    def __post_init__(self) -> None:
        self.text = decompress(self.options.text, self.folder / "text")
        self.default = self.folder / "cache-512"

    def sizes(self) -> Iterator[object]:
        """What comes of the text as it is: padding, bytes, the text again, and the speed of packing its lengths."""
        for length, chunk_size, most in PADDING:
            yield self._padding(length, chunk_size, most)
        yield from self._bits_per_token()
        started = time.perf_counter()
        count = check_round_trip(self.default, texts(self.text))
        yield f"round trip: {count:,} documents decode to their text exactly ({time.perf_counter() - started:.1f} s)"
        yield from self._packing()

    def _padding(self, length: int, chunk_size: int | None, most: float) -> Goal:
        named = {} if chunk_size is None else {"chunk_size": chunk_size}
        root = self.folder / "-".join(["cache", str(length), *map(str, named.values())])
        fb.build(root, fb.sources.jsonl(*self.text), fb.TokenRecipe(tokenizer="gpt2", sequence_length=length, **named))
        layer = fb.summarize(root).layers[0]
        dropped = layer.statistics["tokens_dropped"] + layer.failures + layer.statistics.get("duplicates", 0)
        rows = f"{chunk_size:,}" if chunk_size else "the default"
        note = f"{layer.rows:,} rows in {layer.chunks} chunks; dropped: {dropped}"
        share = 100 * layer.figures["padding_share"]
        return Goal(f"padding at {length}, {rows} rows per chunk", share, "≤", most, "%", 3, note)

    def _bits_per_token(self) -> Iterator[Goal | str]:
        tokens = fb.summarize(self.default).layers[0].statistics["tokens"]
        chunks = sorted((self.default / "layers" / "tokens").glob("0*.safetensors"))
        column = sum(safetensors.numpy.load_file(chunk)["tokens"].nbytes for chunk in chunks)
        everything = [path for path in self.default.rglob("*") if path.is_file()]
        stored = 8 * MB * size(chunks) / tokens
        yield Goal("zstd, all columns and headers of the chunks", stored, "≤", 6.2, "bits/token")
        yield (
            f"    the column of tokens alone {8 * column / tokens:.2f} bits/token; the whole cache, tokenizer and "
            f"generations too, {size(everything):.1f} MB or {8 * MB * size(everything) / tokens:.2f} bits/token"
        )

    def _packing(self) -> Iterator[Goal]:
        by_chunk = document_lengths(self.default)
        lengths = np.concatenate(by_chunk)
        windows = np.split(np.resize(lengths, 10 * WINDOW), 10)
        for name, groups in (("a chunk", by_chunk), (f"{WINDOW:,} documents", windows)):
            rate = sum(map(len, groups)) / min(_seconds_to_pack(groups) for _ in range(20))
            yield Goal(f"split and pack into rows of 512, {name} at a time", rate / 1e6, "≥", 1.0, "M documents/s")

    def estimates(self) -> Iterator[Goal]:
        """What is foretold of the text, compressed and not, against what it became."""
        truth = fb.summarize(self.default).layers[0]
        packed = sorted(self.options.text.glob("*.jsonl.gz"))
        for name, files in ((".jsonl", self.text), (".jsonl.gz", packed)):
            if not files:
                continue
            found = run("estimate", *files, environment=ENVIRONMENT)
            for what, value in (("rows", truth.rows), ("bytes", truth.bytes)):
                error = 100 * (found[what] / value - 1)
                note = f"{found[what]:,} for {value:,}"
                yield Goal(f"estimate of {name}: error of {what}", abs(error), "≤", 5, "%", 2, note)
            yield Goal(f"estimate of {name}: share that is sampled", 100 * found["sampled"], "≤", 5, "%")
            share = 100 * found["read"] / MB / size(files)
            note = f"in {found['seconds']:.2f} s, what is read twice counted twice"
            yield Goal(f"estimate of {name}: bytes read / bytes of the files", share, "≤", 5, "%", 2, note)

    def rates(self) -> Iterator[object]:
        """End to end, one worker, against the bare work and peers; two workers against one."""
        files = repeat(self.text, self.folder / "repeated", self.options.megabytes)
        amount = size(files)
        runs: dict[str, Run] = {
            "one": lambda: self._build(files, 1),
            "bare": lambda: run("bare", *files, environment=ENVIRONMENT),
            "two": lambda: self._build(files, 2),
        }
        python = None if self.options.without_peers else peers_python(self.options.peers)
        parts = {} if python is None else self._shares(files[0])
        for name, part in parts.items():
            runs[name] = partial(PEERS[name].run, python, [part], ENVIRONMENT)
        best = _best_of(self.options.rounds, runs)
        one, bare = best["one"], best["bare"]
        yield (
            f"{amount:.0f} MB, {bare['documents']:,} documents, {bare['tokens'] / 1e6:.1f} M tokens; one worker: "
            f"{one['seconds']:.2f} s, {one['planning']:.2f} s of it before the first chunk is given out"
        )
        seconds = one["seconds"]
        yield _ratio("build, one worker / JSON parsing + fastokens alone", seconds, bare["seconds"], amount, 0.55)
        yield _ratio("build, two workers / one worker", best["two"]["seconds"], seconds, amount, 1.7)
        if python is not None:
            yield f"peers: {versions(python)}"
        for name, part in parts.items():
            self._check_tokens(name, part, best[name]["tokens"])
            theirs = best[name]["seconds"] * amount / size([part])
            yield _ratio(f"build / {name} ({size([part]):.0f} MB)", seconds, theirs, amount, PEERS[name].goal)

    def _shares(self, file: Path) -> dict[str, Path]:
        """The beginning of the text, as much of it as each peer is timed on."""
        return {
            name: beginning(file, self.folder / f"part-of-{peer.megabytes}.jsonl", peer.megabytes)
            for name, peer in PEERS.items()
        }

    def _check_tokens(self, name: str, part: Path, tokens: int) -> None:
        """A peer that makes other tokens of the text does other work."""
        bare = run("bare", part, environment=ENVIRONMENT)
        if tokens != bare["tokens"] + bare["documents"]:
            raise AssertionError(f"{name} made {tokens:,} tokens, not {bare['tokens']:,} + {bare['documents']:,} ends")

    def memory(self) -> Iterator[object]:
        """One worker's peak, for a quarter of the text and for all of it."""
        files = sorted((self.folder / "repeated").glob("part-*.jsonl"))
        quarter, whole = (self._peak(some) for some in (files[: len(files) // 4], files))
        seen = f"RSS {whole[0]:.0f} MB, PSS {whole[1]:.0f} MB for {size(files):.0f} MB of text"
        yield Goal("peak memory of a worker", whole[0], "≤", 700, "MB", 0, seen)
        growth = whole[0] / quarter[0]
        note = f"RSS {quarter[0]:.0f} MB, PSS {quarter[1]:.0f} MB for a quarter"
        yield Goal("peak memory of a worker: four times the text / once", growth, "≤", 1.1, "×", 2, note)

    def _build(self, files: list[Path], workers: int) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(dir=self.folder) as scratch:
            return run("build", Path(scratch, "cache"), workers, *files, environment=ENVIRONMENT)

    def _peak(self, files: list[Path]) -> tuple[float, float]:
        with tempfile.TemporaryDirectory(dir=self.folder) as scratch:
            return worker_peak(Path(scratch, "cache"), files, 1, ENVIRONMENT)


def _best_of(rounds: int, runs: dict[str, Run]) -> dict[str, dict[str, Any]]:
    """The fastest of each, where all took turns."""
    taken: dict[str, list[dict[str, Any]]] = {name: [] for name in runs}
    for round_ in range(rounds):
        for name in list(runs)[:: -1 if round_ % 2 else 1]:
            taken[name].append(runs[name]())
    return {name: min(each, key=lambda answer: answer["seconds"]) for name, each in taken.items()}


def _ratio(name: str, ours: float, theirs: float, amount: float, goal: float) -> Comparison:
    return Comparison(name, ours, theirs, amount, "MB", goal)


def _seconds_to_pack(groups: list[np.ndarray]) -> float:
    """Of the processor: the call is short, and other processes would count into it."""
    started = time.process_time()
    for lengths in groups:
        pack_best_fit(split_documents(lengths, 512).length, 512)
    return time.process_time() - started


if __name__ == "__main__":
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {time.strftime('%Y-%m-%d')}")
    main(sys.argv[1:])
