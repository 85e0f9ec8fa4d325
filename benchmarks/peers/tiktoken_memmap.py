"""JSON lines to one `numpy.memmap` of ids with `tiktoken`, as nanoGPT prepares its data, in one process.

    python tiktoken_memmap.py VOCAB_BPE ENCODER_JSON SCRATCH_FOLDER FILE…

Prints the seconds it took and the tokens, as one line of JSON. Ids are made a document at a time with
`encode_ordinary`, then written to the map in batches; nanoGPT's `datasets.map` around it, which only adds to the time
of one process, is left out.
"""

import json
import os
import sys
import time
from pathlib import Path

import numpy as np
import tiktoken
from tiktoken.load import data_gym_to_mergeable_bpe_ranks

BATCHES = 1024
PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
END_OF_TEXT = 50256


def main(vocab_bpe: str, encoder_json: str, scratch: str, *files: str) -> None:
    encoding = gpt2(vocab_bpe, encoder_json)
    started = time.perf_counter()
    documents = [encoded(encoding, line) for file in files for line in lines(file)]
    tokens = write(Path(scratch, "train.bin"), documents)
    print(json.dumps({"seconds": time.perf_counter() - started, "tokens": tokens}))


def gpt2(vocab_bpe: str, encoder_json: str) -> tiktoken.Encoding:
    os.environ["TIKTOKEN_CACHE_DIR"] = ""  # the two files are here already
    ranks = data_gym_to_mergeable_bpe_ranks(vocab_bpe, encoder_json)
    special = {"<|endoftext|>": END_OF_TEXT}
    return tiktoken.Encoding("gpt2", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special)


def lines(file: str) -> list[bytes]:
    with open(file, "rb") as opened:
        return opened.readlines()


def encoded(encoding: tiktoken.Encoding, line: bytes) -> np.ndarray:
    ids = encoding.encode_ordinary(json.loads(line)["text"])
    ids.append(END_OF_TEXT)
    return np.array(ids, np.uint16)


def write(path: Path, documents: list[np.ndarray]) -> int:
    tokens = sum(map(len, documents))
    ids = np.memmap(path, np.uint16, "w+", shape=(tokens,))
    at = 0
    for batch in np.array_split(np.arange(len(documents)), BATCHES):
        together = np.concatenate([np.zeros(0, np.uint16), *(documents[number] for number in batch)])
        ids[at : at + len(together)] = together
        at += len(together)
    ids.flush()
    return tokens


if __name__ == "__main__":
    main(*sys.argv[1:])
