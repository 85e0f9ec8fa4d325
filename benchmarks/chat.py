"""Preparing conversations: render, find masks, tokenize and pack, against TRL's SFTTrainer with packing.

    python -m benchmarks.chat [CONVERSATIONS] [FOLDER WITH .jsonl.gz]

Both get the same conversations, the same tokenizer (GPT-2 with the control tokens of ChatML) and the same template with
`generation` blocks, and make packed rows with a mask of the assistant's tokens. Each runs in one process on one core:
no threads of tokenizers, no worker processes. Times are CPU seconds of the process, so that a busy machine disturbs
neither. Before it is measured, each prepares a few hundred other conversations, which loads libraries and tokenizers;
our first build, which loads them, is timed as well. Ours is the median of three processes, as a build takes little more
than a second; TRL's preparation takes twenty times as long, and runs once. Ours are whole builds: a trial, the chunks,
their checks, compression, files and the index. Packing again is a view, whose rows are gathered when they are read, or
a new cache; reading an epoch of either is timed, too. Goals: ≥ 20 × TRL's preparation, packing again in ≤ 5 % of a
build, and as much memory for all conversations as for a quarter of them.
"""

import gzip
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

os.environ.update(TOKENIZERS_PARALLELISM="false", RAYON_NUM_THREADS="1", FASTOKENS_BPE_THREADS="1", HF_HUB_OFFLINE="1")

import forebay as fb
from forebay.chat import packed_view, repack
from forebay.format.chunk import compressor, raw_bounds, values_of
from forebay.format.tensors import as_bytes
from forebay.tokens.vocabulary import gpt2_json

LENGTH = 2048
FEW = 300
TEMPLATE = """{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}\
{% if message['role'] == 'assistant' %}\
{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}\
{{ message['content'] + '<|im_end|>' + '\n' }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
    text = Path(sys.argv[2] if len(sys.argv) > 2 else "../shared/data/text")
    with tempfile.TemporaryDirectory(dir=os.environ.get("FOREBAY_BENCH_DIR")) as made:
        folder = Path(made)
        write_chats(folder, text, count)
        write_model(folder / "model")
        prepare(folder, "few.jsonl")
        prepare(folder, "chats.jsonl")
        builds = [measured_build(folder, "chats.jsonl") for _ in range(3)]
        loading, ours = (median(each) for each in zip(*builds, strict=True))
        print(f"forebay: {1e6 * ours / count:8.1f} µs per conversation, {count / ours:10,.0f} per second and core")
        print(f"the first {FEW} conversations of a process, with libraries and tokenizers: {loading:.2f} s")
        pack_again(folder, "few.jsonl", long="drop")
        read_epoch(view_again(folder, "few.jsonl", sequence_length=2 * LENGTH))
        size = fb.open_cache(folder / "chats.jsonl-cache")[0]["tokens"].itemsize
        tokens = fb.summarize(folder / "chats.jsonl-cache").layers[0].statistics["tokens"]
        for what, fields in (("sequence length", {"sequence_length": 2 * LENGTH}), ("window", {"chunks": 2})):
            opening = seconds(lambda fields=fields: view_again(folder, "chats.jsonl", **fields))  # type: ignore[misc]
            verdict = "met" if opening <= 0.05 * ours else "MISSED"
            print(f"a view, another {what}: {100 * opening / ours:.1f} % of a build; goal ≤ 5 %  {verdict}")
        for what, fields in (("sequence length", {"sequence_length": 2 * LENGTH}), ("window", {"chunk_size": 500})):
            again = seconds(lambda fields=fields: pack_again(folder, "chats.jsonl", **fields))  # type: ignore[misc]
            verdict = "met" if again <= 0.05 * ours else "MISSED"
            speed = f"{1e6 * again / count:.1f} µs per conversation, {size * tokens / again / 1e6:,.0f} MB/s of tokens"
            print(f"a new cache, another {what}: {100 * again / ours:.1f} % of a build; goal ≤ 5 %  {verdict}; {speed}")
        read = {
            "view": view_again(folder, "chats.jsonl", sequence_length=2 * LENGTH),
            "view of windows": view_again(folder, "chats.jsonl", chunks=2),
            "new cache": fb.open_cache(folder / "chats.jsonl-sequence_length"),
        }
        for what, cache in read.items():
            spent = [seconds(lambda cache=cache: read_epoch(cache)) for _ in range(2)]  # type: ignore[misc]
            first, later = (f"{1e3 * each:.0f} ms, {tokens / each / 1e6:,.0f} M tokens/s" for each in spent)
            print(f"an epoch of batches of the {what}: {first}; once its blocks are decoded {later}")
        for what, spent in codec_seconds(folder / "chats.jsonl-cache").items():
            print(f"  {what} alone: {100 * spent / ours:.1f} % of a build")
        peaks = [peak_bytes(folder, name) for name in ("quarter.jsonl", "chats.jsonl")]
        verdict = "met" if peaks[1] <= 1.1 * peaks[0] else "MISSED"
        print(f"peak memory: {peaks[1] / 1e6:,.0f} MB, {peaks[1] / peaks[0]:.2f} × a quarter; goal ≤ 1.1  {verdict}")
        prepare_with_trl(folder, "few.jsonl")
        theirs = prepare_with_trl(folder, "chats.jsonl")
        print(f"TRL:     {1e6 * theirs / count:8.1f} µs per conversation, {count / theirs:10,.0f} per second and core")
        print(f"ratio {theirs / ours:.1f}; goal ≥ 20  {'met' if theirs >= 20 * ours else 'MISSED'}")
        print(f"with our loading, without theirs: {theirs / (ours + loading):.1f}")


def seconds(work: Callable[[], Any]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


def write_chats(folder: Path, text: Path, count: int) -> None:
    """Conversations of one to three turns, cut from documents: all, a quarter of them, and a few others."""
    chosen = random.Random(0)
    documents = [json.loads(line)["text"] for file in sorted(text.glob("*.jsonl.gz")) for line in _lines(file)]
    chats = []
    for _ in range(count + FEW):
        words = chosen.choice(documents).split(" ")
        messages = []
        for _ in range(chosen.randrange(1, 4)):
            for role, least, most in (("user", 5, 40), ("assistant", 20, 150)):
                begin = chosen.randrange(max(1, len(words) - most))
                messages.append(
                    {"role": role, "content": " ".join(words[begin : begin + chosen.randrange(least, most)])}
                )
        chats.append({"messages": messages})
    for name, some in (("few", chats[count:]), ("chats", chats[:count]), ("quarter", chats[: count // 4])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in some))


def _lines(file: Path) -> list[bytes]:
    with gzip.open(file) as opened:
        return opened.readlines()


def write_model(folder: Path) -> None:
    tokenizer = json.loads(gpt2_json())
    for number, token in enumerate(("<|im_start|>", "<|im_end|>"), 50257):
        tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": number, "content": token})
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE, "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "pad_token": "<|endoftext|>"}))


def prepare(folder: Path, chats: str) -> None:
    """Chunks of 250 rows, so that the memory of a few chunks is small beside the data."""
    recipe = fb.ChatRecipe(tokenizer=str(folder / "model"), sequence_length=LENGTH, long="truncate", chunk_size=250)
    source = fb.sources.lines(folder / chats)
    fb.build(folder / f"{chats}-cache", source, recipe, workers=0, progress=False)


def pack_again(folder: Path, chats: str, **fields: Any) -> None:
    source, recipe = repack(folder / f"{chats}-cache", **fields)
    fb.build(folder / "-".join([chats, *fields]), source, recipe, workers=0, progress=False)


def view_again(folder: Path, chats: str, **fields: Any) -> fb.Cache:
    return packed_view(fb.open_cache(folder / f"{chats}-cache"), **fields)


def read_epoch(cache: fb.Cache) -> None:
    """Batches of 16 rows, in a shuffled order: all columns that a batch of conversations is made of."""
    rows = random.Random(0).sample(range(len(cache)), len(cache))
    for at in range(0, len(rows), 16):
        cache.read(rows[at : at + 16], ["tokens", "seq_lens", "spans", "last_turn"])


def codec_seconds(root: Path) -> dict[str, float]:
    """What no new cache can do without: decompress all columns, compress and hash as many bytes."""
    cache = fb.open_cache(root)
    chunks = list(cache.chunks())
    columns = [(cache.column(name), values) for chunk in chunks for name, values in chunk.items()]
    blocks = [
        as_bytes(values_of(values))[start:stop]
        for column, values in columns
        for start, stop in pairwise(raw_bounds(column, len(values), getattr(values, "offsets", None)).tolist())
    ]
    pack = compressor("zstd", "fast")
    found: list[Any] = []
    spent = {"decompressing": seconds(lambda: list(cache.chunks()))}
    spent["compressing"] = seconds(lambda: found.extend(map(pack, blocks)))
    spent["SHA-256"] = seconds(lambda: hashlib.sha256(b"".join(found)).digest())
    return spent


def measured_build(folder: Path, chats: str) -> tuple[float, float]:
    """CPU seconds of a new process: to load everything with a few conversations, and then to build all."""
    script = (
        "import sys; from pathlib import Path; from benchmarks.chat import prepare, seconds\n"
        "folder, name = Path(sys.argv[1]), sys.argv[2]\n"
        "print(*(seconds(lambda: prepare(folder / 'again', each)) for each in ('few.jsonl', name)))"
    )
    again = folder / "again"
    again.mkdir()
    for name in ("model", "few.jsonl", chats):
        (again / name).symlink_to(folder / name)
    loading, building = _run(script, folder, chats).split()[-2:]
    shutil.rmtree(again)
    return float(loading), float(building)


def peak_bytes(folder: Path, chats: str) -> int:
    """The most memory of a process that builds a cache."""
    script = (
        "import resource, sys; from pathlib import Path; from benchmarks.chat import prepare; import shutil\n"
        "folder = Path(sys.argv[1]); shutil.rmtree(folder / f'{sys.argv[2]}-cache', ignore_errors=True)\n"
        "prepare(folder, sys.argv[2]); print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    return 1024 * int(_run(script, folder, chats).split()[-1])


def _run(script: str, folder: Path, chats: str) -> str:
    run = subprocess.run([sys.executable, "-c", script, str(folder), chats], capture_output=True, text=True, check=True)
    return run.stdout


def prepare_with_trl(folder: Path, chats: str) -> float:
    from datasets import Dataset  # noqa: PLC0415 - a peer, imported where it is measured
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM  # noqa: PLC0415
    from trl import SFTConfig, SFTTrainer  # noqa: PLC0415

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes))
    usual = {"output_dir": str(folder / "trl"), "report_to": [], "use_cpu": True, "bf16": False}
    settings = SFTConfig(
        **usual,
        packing=True,
        max_length=LENGTH,
        assistant_only_loss=True,
        dataset_num_proc=None,
        dataloader_num_workers=0,
    )
    data = Dataset.from_list([json.loads(line) for line in (folder / chats).read_text().splitlines()])
    return seconds(lambda: SFTTrainer(model, args=settings, train_dataset=data, processing_class=tokenizer))


if __name__ == "__main__":
    main()
