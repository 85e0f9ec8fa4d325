"""Hugging Face Datasets: `load_dataset`, `map` with a function that packs as run_clm.py does, `save_to_disk`.

Batches and their state come from torchdata's `StatefulDataLoader`, which its documentation names for resuming.
"""

import os

from datasets import load_dataset, load_from_disk
from tokenizers import Tokenizer
from torch.utils.data import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader


def packed(batch, tokenizer):
    documents = Tokenizer.from_file(tokenizer).encode_batch([f"{text}<|endoftext|>" for text in batch["text"]])
    ids = [token for document in documents for token in document.ids]
    rows = [ids[start : start + 512] for start in range(0, len(ids) - 511, 512)]
    return {"input_ids": rows, "attention_mask": [[1] * 512 for _ in rows], "labels": rows}


def build(files, out, tokenizer):
    texts = load_dataset("json", data_files=files, split="train", cache_dir=os.environ["TRIAL_CACHE"])
    settings = {"batched": True, "batch_size": 100, "num_proc": 2, "remove_columns": ["text"]}
    rows = texts.map(packed, **settings, fn_kwargs={"tokenizer": tokenizer})
    rows.save_to_disk(out, num_shards=8)


def loader(out, batch_size, rank, world):
    rows = load_from_disk(out).with_format("torch")
    sampler = DistributedSampler(rows, world, rank, shuffle=True, seed=0)
    return StatefulDataLoader(rows, batch_size, sampler=sampler, drop_last=True)


# The lines above are counted as those from JSON lines to batches; the rest is only for the trials.

from trial_harness import main  # noqa: E402


def append(files, out, tokenizer):
    """There is no append: all files again, into another folder, since a running reader maps the files of the first."""
    build(files, f"{out}-grown", tokenizer)


def tokens(batch):
    return batch["input_ids"]


if __name__ == "__main__":
    main()
