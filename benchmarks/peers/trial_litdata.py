"""LitData: `optimize` with `TokensLoader` and `use_checkpoint`, `StreamingDataset`, `StreamingDataLoader`."""

import json
from functools import partial
from pathlib import Path

import torch
from litdata import StreamingDataLoader, StreamingDataset, TokensLoader, optimize
from tokenizers import Tokenizer


def tokenized(file, tokenizer):
    texts = [json.loads(line)["text"] + "<|endoftext|>" for line in Path(file).read_text().splitlines()]
    return torch.tensor([token for document in tokenizer.encode_batch(texts) for token in document.ids])


def build(files, out, tokenizer, **settings):
    optimize(
        fn=partial(tokenized, tokenizer=Tokenizer.from_file(tokenizer)),
        inputs=files,
        output_dir=out,
        chunk_bytes=64 * 512 * 8,
        item_loader=TokensLoader(block_size=512),
        num_workers=2,
        **settings or {"use_checkpoint": True},
    )


def loader(out, batch_size, rank, world):
    rows = StreamingDataset(out, item_loader=TokensLoader(block_size=512), shuffle=True, drop_last=True, seed=0)
    return StreamingDataLoader(rows, batch_size=batch_size, drop_last=True)


# The lines above are counted as those from JSON lines to batches; the rest is only for the trials.

from litdata.streaming import downloader  # noqa: E402
from trial_harness import main  # noqa: E402

# Its uploads insist on https, and the server of the trial is on loopback without it.
downloader._OBSTORE_CLIENT_OPTIONS = {**downloader._OBSTORE_CLIENT_OPTIONS, "allow_http": True}


def append(files, out, tokenizer):
    build(files, out, tokenizer, mode="append")


def tokens(batch):
    return batch


if __name__ == "__main__":
    main()
