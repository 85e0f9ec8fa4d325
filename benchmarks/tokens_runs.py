"""One build, or the bare work it cannot do without, in a process of its own: nothing is warm from an earlier round.

    python -m benchmarks.tokens_runs build ROOT WORKERS FILE…    everything `fb.build` does, from a source to a cache
    python -m benchmarks.tokens_runs bare FILE…                  JSON parsing and `fastokens`, nothing kept
    python -m benchmarks.tokens_runs estimate FILE…              what it says, and what it read

Each prints one line of JSON. Imports are not counted; the bare work does not count loading the tokenizer either.
"""

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import fastokens
import msgspec

import forebay as fb
from benchmarks.tokens_corpus import Document
from forebay.cache.records import Estimate
from forebay.tokens.vocabulary import gpt2_json

BLOCK_BYTES = 1 << 20
RECIPE = fb.TokenRecipe(tokenizer="gpt2")


def timed_build(root: str, workers: str, *files: str) -> dict[str, Any]:
    """Also how long it took until the first chunk was made, and each phase."""
    source, firsts, build = fb.sources.jsonl(*files), list[float](), fb.build  # which imports what builds

    def note(progress: fb.Progress) -> None:
        if progress.phase == "building" and progress.done and not firsts:
            firsts.append(time.perf_counter() - started)

    started = time.perf_counter()
    report = build(root, source, RECIPE, workers=int(workers), on_progress=note)
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "first": firsts[0], "chunks": report.chunks, **report.phases}


def bare(*files: str) -> dict[str, Any]:
    tokenizer = fastokens.Tokenizer.from_json_str(gpt2_json().decode())
    decoder = msgspec.json.Decoder(Document)
    tokens = documents = 0
    started, processor = time.perf_counter(), time.process_time()
    for file in files:
        for block in _blocks(file):
            texts = [document.text for document in decoder.decode_lines(block)]
            ids, _ = tokenizer.encode_batch_flat(texts, split_special_tokens=True)
            tokens += len(ids) // 4
            documents += len(texts)
    seconds, processor = time.perf_counter() - started, time.process_time() - processor
    return {"seconds": seconds, "processor": processor, "tokens": tokens, "documents": documents}


def _blocks(file: str) -> Any:
    with open(file, "rb", buffering=0) as plain:
        rest = b""
        while block := plain.read(BLOCK_BYTES):
            end = block.rfind(b"\n") + 1
            if end:
                yield rest + block[:end]
                rest = b""
            rest += block[end:]
    if rest:
        yield rest


def estimate(*files: str) -> dict[str, Any]:
    """A first call, of another file, reads modules and the tokenizer, and leaves nothing of these files in memory."""
    with TemporaryDirectory() as folder:
        other = Path(folder, "other.jsonl")
        other.write_text('{"text": "a few words"}\n' * 100)
        fb.estimate(fb.sources.jsonl(other), RECIPE, workers=0)
    source = fb.sources.jsonl(*files)
    before, started = _bytes_read(), time.perf_counter()
    found: Estimate = fb.estimate(source, RECIPE, workers=0)  # the start of a worker would read modules
    seconds = time.perf_counter() - started
    return {
        "rows": found.rows,
        "bytes": found.stored_bytes,
        "sampled": found.sampled_weight / found.source_weight,
        "read": _bytes_read() - before,
        "seconds": seconds,
    }


def _bytes_read() -> int:
    """What this process asked the kernel for so far."""
    return int(Path("/proc/self/io").read_text().partition("rchar:")[2].split()[0])


def run(what: str, *arguments: object, environment: dict[str, str]) -> dict[str, Any]:
    """One of the above, in a process of its own."""
    return run_together([(what, *arguments)], environment)[0]


def run_together(runs: Sequence[tuple[object, ...]], environment: dict[str, str]) -> list[dict[str, Any]]:
    """Some of the above, each in a process of its own, at the same time."""
    command = [sys.executable, "-m", "benchmarks.tokens_runs"]
    started = [
        subprocess.Popen([*command, *map(str, one)], env=environment, stdout=subprocess.PIPE, text=True) for one in runs
    ]
    answers = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise RuntimeError(f"one of {[one[0] for one in runs]} failed")
    return [json.loads(answer.splitlines()[-1]) for answer in answers]


if __name__ == "__main__":
    print(json.dumps({"build": timed_build, "bare": bare, "estimate": estimate}[sys.argv[1]](*sys.argv[2:])))
