"""A chat cache in a bucket, packed again when it is read."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.chat.test_chat_builds import model, write_chats

import forebay as fb
from forebay.chat import PackedView, packed_view
from forebay.torch import Loader


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("with_tier", [False, True])
def test_a_cache_in_a_bucket_gives_the_batches_of_a_folder(
    bucket: str, with_tier: bool, chunks: int, tmp_path: Path
) -> None:
    recipe = fb.ChatRecipe(tokenizer=model(tmp_path / "model"), sequence_length=512, chunk_size=4)
    fb.build(tmp_path / "cache", fb.sources.lines(write_chats(tmp_path / "chats.jsonl", 40)), recipe, workers=0)
    fb.copy(tmp_path / "cache", f"{bucket}/sft")
    tier = tmp_path / "tier" if with_tier else None
    caches = fb.open_cache(f"{bucket}/sft", tier=tier), fb.open_cache(tmp_path / "cache")
    loaders = [
        Loader(packed_view(cache, sequence_length=700, chunks=chunks), global_batch_size=2, shuffle="window", seed=1)
        for cache in caches
    ]
    states = [loader.state_dict()["stream"]["chunks"] for loader in loaders]
    assert states[0] == states[1]
    rows = [sorted(tuple(row) for batch in loader for row in batch["tokens"].tolist()) for loader in loaders]
    assert rows[0] == rows[1]
    sequential = [
        Loader(packed_view(cache, sequence_length=700, chunks=chunks), global_batch_size=2, shuffle=None)
        for cache in caches
    ]
    for one, other in zip(*sequential, strict=True):
        assert torch.equal(one["labels"], other["labels"])


def test_all_files_of_a_window_are_fetched_together(bucket: str, tmp_path: Path) -> None:
    recipe = fb.ChatRecipe(tokenizer=model(tmp_path / "model"), sequence_length=512, chunk_size=3)
    fb.build(tmp_path / "cache", fb.sources.lines(write_chats(tmp_path / "chats.jsonl", 80)), recipe, workers=0)
    fb.copy(tmp_path / "cache", f"{bucket}/sft")
    known = packed_view(fb.open_cache(tmp_path / "cache"), sequence_length=700, chunks=2)
    assert len(known.chunk_numbers) > 2
    for fetch in (PackedView.open_chunk, PackedView.keep_chunk):
        far = fb.open_cache(f"{bucket}/sft", tier=tmp_path / fetch.__name__)
        view = PackedView(far, known.packing, known.windows, known.counts)  # opened without reading a chunk
        assert not view.kept_digests()
        assert fetch(view, 1, ["tokens"]) in (None, True)
        assert sorted(view.kept_digests()) == sorted(known.file_digests(np.array([1]), ["tokens"]))
        assert len(view.kept_digests()) == 2
