"""Small preference and chat caches, and language models for them."""

import json
from pathlib import Path
from typing import Any

import torch
from tests.chat.stock_templates import CHATML
from tests.chat.tokenizer_folders import byte_level, write_folder
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import forebay as fb

VOCABULARY = 384  # the tokenizer has 377 tokens


def chatml(path: Path) -> str:
    return write_folder(path, byte_level(CHATML.special), CHATML.plain(), CHATML.tokens)


def write_lines(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def pairs(count: int) -> list[dict[str, Any]]:
    """Questions with a good and a bad answer, of many lengths; some with scores, or with more than two answers."""
    found: list[dict[str, Any]] = []
    for number in range(count):
        record: dict[str, Any] = {
            "prompt": f"Question {number}? " * (1 + number % 4),
            "chosen": f"I am a small model {number}. " * (1 + number % 3),
            "rejected": "No" + "." * (number % 7),
        }
        if number % 5 == 4:
            answers = [record.pop("rejected"), "one two", record.pop("chosen")]
            record |= {"candidates": answers, "scores": [1, 2.5, 7]}
        found.append(record)
    return found


def preference_cache(root: Path, count: int = 40, **fields: Any) -> fb.Cache:
    source = write_lines(root / "pairs.jsonl", pairs(count))
    recipe = fb.PreferenceRecipe(
        tokenizer=chatml(root / "tokenizer"), **{"sequence_length": 96, "chunk_rows": 16, **fields}
    )
    fb.build(root / "cache", fb.sources.lines(source), recipe, workers=0)
    return fb.open_cache(root / "cache")


def chat_cache(root: Path, count: int = 30, **fields: Any) -> fb.Cache:
    records = [
        {
            "messages": [
                {"role": "user", "content": f"Question {number}?"},
                {"role": "assistant", "content": "one two three " * (1 + number % 5)},
                {"role": "user", "content": "And?"},
                {"role": "assistant", "content": f"Hello {number}"},
            ]
        }
        for number in range(count)
    ]
    source = write_lines(root / "chats.jsonl", records)
    recipe = fb.ChatRecipe(tokenizer=chatml(root / "tokenizer"), **{"sequence_length": 96, "chunk_rows": 12, **fields})
    fb.build(root / "cache", fb.sources.lines(source), recipe, workers=0)
    return fb.open_cache(root / "cache")


def llama(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def gpt2(seed: int = 0) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    config = GPT2Config(vocab_size=VOCABULARY, n_positions=128, n_embd=32, n_layer=2, n_head=4)
    return GPT2LMHeadModel(config).eval()
