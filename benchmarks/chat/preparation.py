"""Preparing conversations: render, find spans, tokenize, pack and write, next to TRL's SFTTrainer with packing.

Both get the same conversations, tokenizer (GPT-2 with the control tokens of ChatML) and template with `generation`
blocks. Each runs in one process without tokenizer threads or workers, timed in CPU seconds after a few other
conversations have loaded its libraries. Ours are whole builds, with the child process that renders templates; TRL takes
twenty times as long and runs once.
"""

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.update(TOKENIZERS_PARALLELISM="false", RAYON_NUM_THREADS="1", FASTOKENS_BPE_THREADS="1", HF_HUB_OFFLINE="1")

import forebay as fb
from benchmarks.lib.corpus import documents
from benchmarks.lib.options import Options
from benchmarks.lib.result import Result, compared
from forebay.chat import rendering
from forebay.tokens.vocabulary import gpt2_json

CASE = "chat.preparation"
LENGTH = 2048
FEW = 300
TEMPLATE = """{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}\
{% if message['role'] == 'assistant' %}\
{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}\
{{ message['content'] + '<|im_end|>' + '\n' }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


def measure(options: Options) -> Iterator[Result]:
    count = 400 if options.is_quick else 10_000
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        write_chats(folder, documents(options.text), count)
        write_model(folder / "model")
        ours = [count / measured_build(folder, "chats.jsonl") for _ in range(options.rounds)]
        prepare_with_trl(folder, "few.jsonl")
        theirs = count / prepare_with_trl(folder, "chats.jsonl")
    yield compared(
        CASE, f"render, find spans, tokenize, pack and write {count:,} conversations, CPU seconds",
        "TRL SFTTrainer with packing, once", ours, [theirs] * len(ours), unit="conversations/s",
        equal="same conversations; tests compare the loss masks", at_least=20,
    )  # fmt: skip


def seconds(work: Callable[[], Any]) -> float:
    """CPU seconds of this process and of the child that renders templates, which is ended so that it is counted."""
    started = sum(os.times()[:4])
    work()
    rendering._children.stop()
    return sum(os.times()[:4]) - started


def write_chats(folder: Path, texts: list[str], count: int) -> None:
    """Conversations of one to three turns, cut from documents: all, a quarter of them, and a few others."""
    chosen = random.Random(0)
    chats = []
    for _ in range(count + FEW):
        words = chosen.choice(texts).split(" ")
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
    recipe = fb.ChatRecipe(tokenizer=str(folder / "model"), sequence_length=LENGTH, long="truncate", chunk_rows=250)
    source = fb.sources.lines(folder / chats)
    fb.build(folder / f"{chats}-cache", source, recipe, workers=0, progress=False)


def measured_build(folder: Path, chats: str) -> float:
    """CPU seconds of a build in a new process that has built a few other conversations before."""
    script = (
        "import sys; from pathlib import Path; from benchmarks.chat.preparation import prepare, seconds\n"
        "folder, name = Path(sys.argv[1]), sys.argv[2]\n"
        "print(*(seconds(lambda: prepare(folder / 'again', each)) for each in ('few.jsonl', name)))"
    )
    again = folder / "again"
    again.mkdir()
    for name in ("model", "few.jsonl", chats):
        (again / name).symlink_to(folder / name)
    building = _run(script, folder, chats).split()[-1]
    shutil.rmtree(again)
    return float(building)


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
