"""MosaicML Streaming: `MDSWriter`, `StreamingDataset`, `StreamingDataLoader`; `merge_index` over several builders."""

import json
from pathlib import Path

import numpy as np
import trial_torchvision  # noqa: F401  (streaming imports torchvision, whose operators a CPU build lacks)
from streaming import MDSWriter, StreamingDataLoader, StreamingDataset
from tokenizers import Tokenizer


def packed(files, tokenizer):
    encoder, ids = Tokenizer.from_file(tokenizer), []
    for line in (line for file in files for line in Path(file).read_text().splitlines()):
        ids.extend(encoder.encode(json.loads(line)["text"] + "<|endoftext|>").ids)
        while len(ids) >= 512:
            yield np.array(ids[:512], np.int32)
            del ids[:512]


def build(files, out, tokenizer):
    columns = {"tokens": "ndarray:int32:512"}
    with MDSWriter(out=out, columns=columns, hashes=["sha1"], size_limit=64 * 512 * 4) as writer:
        for row in packed(files, tokenizer):
            writer.write({"tokens": row})


def loader(out, batch_size, rank, world):
    rows = StreamingDataset(local=out, shuffle=True, shuffle_seed=0, batch_size=batch_size, validate_hash="sha1")
    return StreamingDataLoader(rows, batch_size=batch_size, drop_last=True)


# The lines above are counted as those from JSON lines to batches; the rest is only for the trials.

from streaming.base.util import merge_index  # noqa: E402
from trial_harness import main  # noqa: E402


def build_part(files, out, tokenizer, part, parts):
    build(files[part::parts], f"{out}/{part}", tokenizer)


def merge(out):
    merge_index(out, keep_local=True)


def begin(files, out, tokenizer):
    build_part(files, out, tokenizer, 0, 1)
    merge(out)


def append(files, out, tokenizer):
    """Another folder of shards beside the first, then one index of both, as documented for parallel conversion."""
    build(files, f"{out}/1", tokenizer)
    Path(out, "index.json").unlink()  # merge_index refuses to replace it
    merge(out)


def tokens(batch):
    return batch["tokens"]


if __name__ == "__main__":
    main()
