"""A plain script: ids in one `numpy.memmap`, rows of it through torchdata's `StatefulDataLoader`."""

import json
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch.utils.data import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader


def build(files, out, tokenizer, mode="wb"):
    encoder = Tokenizer.from_file(tokenizer)
    Path(out).mkdir(parents=True, exist_ok=True)
    with open(f"{out}/ids.bin", mode, buffering=0) as ids:
        for line in (line for file in files for line in Path(file).read_text().splitlines()):
            ids.write(np.array(encoder.encode(json.loads(line)["text"] + "<|endoftext|>").ids, np.uint16).tobytes())


def loader(out, batch_size, rank, world):
    ids = np.memmap(f"{out}/ids.bin", np.uint16, "r")
    rows = ids[: len(ids) // 512 * 512].reshape(-1, 512)
    sampler = DistributedSampler(rows, world, rank, shuffle=True, seed=0)
    return StatefulDataLoader(rows, batch_size, sampler=sampler, drop_last=True)


# The lines above are counted as those from JSON lines to batches; the rest is only for the trials.

from trial_harness import main  # noqa: E402


def append(files, out, tokenizer):
    build(files, out, tokenizer, "ab")


bucket = None  # numpy maps files


def tokens(batch):
    return torch.as_tensor(batch)


if __name__ == "__main__":
    main()
