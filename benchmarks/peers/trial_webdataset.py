"""WebDataset: `ShardWriter`, and `WebDataset` with its seeded shuffles.

It has no state to save; torchdata's `StatefulDataLoader`, which skips the batches that were read, is tried instead.
"""

import json
from glob import glob
from pathlib import Path

import numpy as np
import torch
import webdataset as wds
from tokenizers import Tokenizer
from torchdata.stateful_dataloader import StatefulDataLoader


def packed(files, tokenizer):
    encoder, ids = Tokenizer.from_file(tokenizer), []
    for line in (line for file in files for line in Path(file).read_text().splitlines()):
        ids.extend(encoder.encode(json.loads(line)["text"] + "<|endoftext|>").ids)
        while len(ids) >= 512:
            yield np.array(ids[:512], np.int32)
            del ids[:512]


def build(files, out, tokenizer, start=0):
    Path(out).mkdir(parents=True, exist_ok=True)
    with wds.ShardWriter(f"{out}/%06d.tar", maxcount=64, start_shard=start, mtime=0) as shards:
        for number, row in enumerate(packed(files, tokenizer)):
            shards.write({"__key__": f"{start:06d}-{number:09d}", "npy": row})


def loader(out, batch_size, rank, world):
    shards = sorted(glob(f"{out}/*.tar"))
    rows = wds.WebDataset(shards, shardshuffle=100, detshuffle=True, seed=0, nodesplitter=wds.split_by_node)
    shuffled = rows.compose(wds.detshuffle(256)).decode().to_tuple("npy")
    batches = shuffled.batched(batch_size, partial=False)
    return StatefulDataLoader(batches, batch_size=None)


# The lines above are counted as those from JSON lines to batches; the rest is only for the trials.

import os  # noqa: E402

from trial_harness import main  # noqa: E402


def append(files, out, tokenizer):
    build(files, out, tokenizer, start=len(glob(f"{out}/*.tar")))


def bucket(files, out, tokenizer):
    """Shards through `pipe:`, which is its way to any service: here curl, since the server takes unsigned requests."""
    url = out.replace("s3://", os.environ["AWS_ENDPOINT_URL"] + "/")
    with wds.ShardWriter(f"pipe:curl -sfT - {url}/%06d.tar", maxcount=64, mtime=0) as shards:
        for number, row in enumerate(packed(files, tokenizer)):
            shards.write({"__key__": f"{number:09d}", "npy": row})


def tokens(batch):
    return torch.as_tensor(np.stack(batch[0]))


if __name__ == "__main__":
    main()
