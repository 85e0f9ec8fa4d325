"""forebay: `build`, `grow` and `Loader`."""

import torch

import forebay as fb
from forebay.torch import Loader


def build(files, out, tokenizer):
    recipe = fb.TokenRecipe(tokenizer=tokenizer, sequence_length=512, chunk_rows=64)
    return fb.build(out, fb.sources.jsonl(*files, text="text"), recipe).built


def loader(out, batch_size, rank, world):
    return Loader(fb.open_cache(out), global_batch_size=batch_size * world, growth="epoch", seed=0)


# The lines above are counted as those from JSON lines to batches; the rest is only for the trials.

from trial_harness import main  # noqa: E402


def append(files, out, tokenizer):
    return fb.update(out, fb.sources.jsonl(*files, text="text")).built


def repair(out):
    return str(fb.repair(out))


def tokens(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return batch["tokens"]


if __name__ == "__main__":
    main()
