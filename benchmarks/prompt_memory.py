"""The memory of building, checking and reading T5 states of many prompts, 128 × 768 each, seen from outside.

The encoder is as wide as T5-base, with one small layer, so that time goes into the states and not into the model. Goal:
100,000 prompts, 19.7 GB, in at most 1 GB of anonymous memory of the builder and its workers together.

With --seconds the build is stopped by a signal after that time, and the folder is kept: the same command continues, and
reports whether a chunk that was there before has changed. The run that completes the layer verifies every byte, reads a
batch and removes the folder.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, T5Config, T5EncoderModel

TOKENS, WIDTH = 128, 768
LOOK_SECONDS = 0.05
GOAL_BYTES = 1_000_000_000
ENDED_BY = {"INT": 130, "TERM": 130, "KILL": -signal.SIGKILL}  # exit codes of a build that was stopped
FOREBAY = (sys.executable, "-m", "forebay")
READ_A_BATCH = """
import sys, numpy as np, forebay as fb
cache = fb.open_cache(sys.argv[1])
rows = np.linspace(0, len(cache) - 1, 64).astype(int)
states = fb.teachers.shared(cache, "t5_states").read(rows)
assert states.shape == (64, 128, 768) and np.isfinite(states).all(), states.shape
"""


class Watched(NamedTuple):
    """A command that has ended."""

    code: int
    peak_bytes: int  # the most anonymous memory that it and its children held at one time
    seconds: float


def main() -> None:
    options = _options()
    folder = options.folder / f"forebay-prompts-{options.rows}"
    cache, layer = folder / "cache", folder / "cache" / "layers" / "t5"
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {time.strftime('%Y-%m-%d %H:%M')}", flush=True)
    if not folder.exists():
        _begin(folder, options)
    before = _chunks(layer)
    ragged = ["--ragged-t5"] * options.ragged
    teachers = ("build", "teachers", str(cache), "--t5", str(folder / "t5"), "--batch-size", "32", "-q", *ragged)
    built = _watched([*FOREBAY, *teachers], options.seconds, options.stop)
    after = _chunks(layer)
    _report("building", built)
    changed = sum(after.get(name) != state for name, state in before.items())
    print(
        f"chunks: {len(before):,} before, {len(after):,} after; {changed:,} of those before were made again", flush=True
    )
    if built.code == ENDED_BY[options.stop]:
        print(f"stopped by SIG{options.stop}; the same command continues")
        return
    if built.code:
        sys.exit(f"the build ended with {built.code}; '{folder}' is kept")
    print(f"{options.rows:,} prompts: {sum(state[0] for state in after.values()):,} bytes in {len(after):,} chunks")
    _report("verifying every byte", _watched([*FOREBAY, "verify", str(cache), "--full"]))
    if not options.ragged:
        _report("opening, and reading a batch of 64", _watched([sys.executable, "-c", READ_A_BATCH, str(cache)]))
    shutil.rmtree(folder)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--chunk-rows", type=int, default=512)
    parser.add_argument("--ragged", action="store_true", help="store real tokens only")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--seconds", type=float, help="stop the build after this time, to be continued")
    parser.add_argument("--stop", choices=list(ENDED_BY), default="INT", help="the signal that stops it")
    return parser.parse_args()


def _begin(folder: Path, options: argparse.Namespace) -> None:
    folder.mkdir(parents=True)
    _save_encoder(folder / "t5")
    (folder / "prompts.txt").write_text("".join(_prompts(options.rows)))
    rows = ("--chunk-rows", str(options.chunk_rows), "-q")
    source = str(folder / "prompts.txt")
    _report("the prompts", _watched([*FOREBAY, "build", "raw", source, "--into", str(folder / "cache"), *rows]))


def _chunks(layer: Path) -> dict[str, tuple[int, int, int]]:
    """Return size, time and inode of every chunk: a chunk that was made again has others."""
    found = ((path.name, path.stat()) for path in layer.glob("0*.safetensors"))
    return {name: (stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in found}


def _report(what: str, watched: Watched) -> None:
    verdict = "met" if watched.peak_bytes <= GOAL_BYTES else "MISSED"
    print(
        f"{what}: exit {watched.code}, {watched.seconds:,.0f} s, peak anonymous memory "
        f"{watched.peak_bytes / 1e6:,.0f} MB, goal ≤ {GOAL_BYTES / 1e6:,.0f} MB: {verdict}",
        flush=True,
    )


def _prompts(count: int) -> Iterator[str]:
    """Distinct prompts of 5 to 44 words."""
    for number in range(count):
        yield " ".join(["photo", *f"{number:06d}", *["word"] * (number % 40)]) + "\n"


def _save_encoder(folder: Path) -> None:
    torch.manual_seed(0)
    config = T5Config(vocab_size=32, d_model=WIDTH, d_kv=16, d_ff=64, num_layers=1, num_heads=2)
    T5EncoderModel(config).save_pretrained(folder)
    words = ("<pad>", "</s>", "<unk>", "photo", "word", *"0123456789")
    tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)


def _watched(command: list[str], seconds: float | None = None, stop: str = "INT") -> Watched:
    """Run a command, and send it a signal if it still runs after some time."""
    most, began = 0, time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            most = max(most, sum(map(_anonymous_bytes, _family(process.pid))))
            if seconds is not None and time.perf_counter() - began > seconds:
                process.send_signal(signal.Signals[f"SIG{stop}"])
                seconds = None
            time.sleep(LOOK_SECONDS)
    return Watched(process.returncode, most, time.perf_counter() - began)


def _family(pid: int) -> list[int]:
    with suppress(psutil.NoSuchProcess):
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    return []


def _anonymous_bytes(pid: int) -> int:
    with suppress(OSError, IndexError):  # it may have ended
        return int(Path(f"/proc/{pid}/status").read_text().partition("RssAnon:")[2].split()[0]) * 1024
    return 0


if __name__ == "__main__":
    main()
