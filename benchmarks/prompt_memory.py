"""The memory of building T5 states of many prompts, 128 × 768 each, with the command line, seen from outside.

The encoder is as wide as T5-base, with one small layer, so that time goes into the states and not into the model. Goal:
100,000 prompts, 19.7 GB, in at most 1 GB of anonymous memory of the builder and its workers together.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, T5Config, T5EncoderModel

TOKENS, WIDTH = 128, 768
LOOK_SECONDS = 0.05
GOAL_BYTES = 1_000_000_000


def main() -> None:
    options = _options()
    folder = Path(tempfile.mkdtemp(prefix="forebay-prompts-", dir=options.folder))
    try:
        _save_encoder(folder / "t5")
        (folder / "prompts.txt").write_text("".join(_prompts(options.rows)))
        cache = str(folder / "cache")
        _peak("build", "raw", str(folder / "prompts.txt"), "--into", cache, "--chunk-rows", str(options.chunk_rows))
        began = time.perf_counter()
        ragged = ["--ragged-t5"] * options.ragged
        peak = _peak("build", "teachers", cache, "--t5", str(folder / "t5"), "--batch-size", "32", *ragged)
        seconds = time.perf_counter() - began
        files = [path.stat().st_size for path in (folder / "cache" / "layers" / "t5").glob("0*.safetensors")]
        print(f"{options.rows:,} prompts: {sum(files):,} bytes in {len(files):,} chunks, {seconds:,.0f} s")
        verdict = "met" if peak <= GOAL_BYTES else "MISSED"
        print(f"peak anonymous memory {peak / 1e6:,.0f} MB, goal ≤ {GOAL_BYTES / 1e6:,.0f} MB: {verdict}")
    finally:
        shutil.rmtree(folder)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--chunk-rows", type=int, default=512)
    parser.add_argument("--ragged", action="store_true", help="store real tokens only")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    return parser.parse_args()


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


def _peak(*arguments: str) -> int:
    """Run forebay, and return the most anonymous memory that it and its children held at one time."""
    command = [sys.executable, "-m", "forebay", *arguments]
    most = 0
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as builder:
        while builder.poll() is None:
            most = max(most, sum(map(_anonymous_bytes, _family(builder.pid))))
            time.sleep(LOOK_SECONDS)
    if builder.returncode:
        raise RuntimeError(f"forebay {' '.join(arguments)} ended with {builder.returncode}")
    return most


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
