"""Text to packed tokens: `fb.build` next to JSON parsing and encoding alone, and next to TRL's preparation.

Every timed run is a fresh process; imports are not counted. The bare work keeps nothing; a build also tries samples,
plans, packs, compresses, hashes and writes.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.lib.corpus import documents, size, write_unique, write_unseen_words
from benchmarks.lib.files import into_memory, prepared
from benchmarks.lib.options import Options
from benchmarks.lib.peers import Peer, run_peer
from benchmarks.lib.result import Result, compared
from benchmarks.lib.timing import in_turn
from forebay.engine.base import THREADS

CASE = "build.text"
BLOCK_BYTES = 1 << 20
TRL = Peer("datasets.map + TRL pack_dataset", "trl_packing.py")
ENVIRONMENT = {**os.environ, **dict.fromkeys(THREADS, "1")}


def measure(options: Options) -> Iterator[Result]:
    megabytes = 20 if options.is_quick else 500
    text = prepared(
        options.folder / f"unique-{megabytes}",
        f"{megabytes} MB of {options.text}",
        lambda folder: write_unique(folder, documents(options.text), megabytes),
    )
    yield from against_bare_work(options, text, f"{megabytes} MB of unique text")
    fewer = max(10, megabytes // 5)
    unseen = prepared(options.folder / f"unseen-{fewer}", str(fewer), lambda folder: write_unseen_words(folder, fewer))
    yield from against_bare_work(options, unseen, f"{fewer} MB of unseen words", has_goals=False)
    yield against_trl(options, text)


def against_bare_work(options: Options, text: Path, what: str, *, has_goals: bool = True) -> Iterator[Result]:
    into_memory(text)
    files = sorted(map(str, text.iterdir()))
    megabytes, root = size([Path(file) for file in files]), options.folder / "built"

    def build(workers: int) -> float:
        shutil.rmtree(root, ignore_errors=True)
        return megabytes / in_process("build", root, workers, *files)["seconds"]

    def bare() -> float:
        return megabytes / in_process("bare", *files)["seconds"]

    rates = in_turn({"one": lambda: build(1), "two": lambda: build(2), "bare": bare}, options.rounds)
    shutil.rmtree(root, ignore_errors=True)
    one = f"build, one worker, {what}"
    yield compared(
        CASE, one, "JSON parsing + fastokens, one thread", rates["one"], rates["bare"], unit="MB/s",
        equal="not compared: the peer keeps nothing", at_least=0.5 if has_goals else None,
    )  # fmt: skip
    yield compared(
        CASE, f"build, two workers, {what}", "build, one worker", rates["two"], rates["one"], unit="MB/s",
        equal="same chunk bytes", at_least=1.6 if has_goals else None,
    )  # fmt: skip


def against_trl(options: Options, text: Path) -> Result:
    """The first megabytes of the text, once: TRL takes a minute for them."""
    megabytes = 2 if options.is_quick else 20
    part, root, scratch = (options.folder / name for name in ("beginning.jsonl", "built", "trl"))
    with sorted(text.iterdir())[0].open("rb") as whole, part.open("wb") as file:
        while file.tell() < megabytes * 1_000_000 and (line := whole.readline()):
            file.write(line)
    for folder in (root, scratch):
        shutil.rmtree(folder, ignore_errors=True)
    ours = in_process("build", root, 1, part)
    tokenizer = options.folder / "tokenizer.json"
    tokenizer.write_bytes(_tokenizer())
    theirs = json.loads(run_peer(TRL, options.environments, tokenizer, scratch, part).splitlines()[-1])
    amount = size([part])
    is_same = ours["tokens"] == theirs["tokens"]
    return compared(
        CASE, f"build, one worker, {megabytes} MB", TRL.name, [amount / ours["seconds"]], [amount / theirs["seconds"]],
        unit="MB/s",
        equal=f"{ours['tokens']:,} tokens each" if is_same else f"{ours['tokens']:,} and {theirs['tokens']:,} tokens",
        at_least=20,
    )  # fmt: skip


def in_process(work: str, *arguments: object) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.build.text", work, *map(str, arguments)]
    run = subprocess.run(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True, check=True)
    answer: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return answer


def timed_build(root: str, workers: str, *files: str) -> dict[str, Any]:
    import forebay as fb  # noqa: PLC0415 - the parent process does not need it

    source, build = fb.sources.jsonl(*files), fb.build
    recipe = fb.TokenRecipe(tokenizer="gpt2")
    started = time.perf_counter()
    build(root, source, recipe, workers=int(workers), progress=False)
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "tokens": int(fb.info(root).layers[0].statistics["tokens"])}


def timed_bare_work(*files: str) -> dict[str, Any]:
    import fastokens  # noqa: PLC0415
    import msgspec  # noqa: PLC0415

    from benchmarks.lib.corpus import Document  # noqa: PLC0415

    tokenizer, decoder = fastokens.Tokenizer.from_json_str(_tokenizer().decode()), msgspec.json.Decoder(Document)
    tokens, started = 0, time.perf_counter()
    for file in files:
        for block in _blocks(file):
            texts = [document.text for document in decoder.decode_lines(block)]
            ids, _ = tokenizer.encode_batch_flat(texts, split_special_tokens=True)
            tokens += len(ids) // 4
    return {"seconds": time.perf_counter() - started, "tokens": tokens}


def _tokenizer() -> bytes:
    from forebay.tokens.vocabulary import gpt2_json  # noqa: PLC0415

    return gpt2_json()


def _blocks(file: str) -> Iterator[bytes]:
    """The lines of a file, about a mebibyte at a time."""
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


if __name__ == "__main__":
    print(json.dumps({"build": timed_build, "bare": timed_bare_work}[sys.argv[1]](*sys.argv[2:])))
