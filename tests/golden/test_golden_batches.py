"""Every tensor of some batches of 46 loader configurations, as SHA-256 in batches.json.

`python -m tests.golden.test_golden_batches` writes the file again; tests/golden/README.md lists every intended change.
"""

import hashlib
import itertools
import json
import tempfile
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest
import torch
from tests.chat.preference_caches import chat_cache, preference_cache
from tests.helpers.image_caches import image_cache, write_pictures
from tests.helpers.layer_recipes import layered_cache
from tests.helpers.token_caches import token_cache
from tests.teachers.own_teachers import Letters, Ramp, prompt_cache

import forebay as fb
from forebay.columns import Column, Columns, Ragged
from forebay.teachers import TeacherRecipe
from forebay.torch import (
    BucketLoader,
    Ingredient,
    Loader,
    Mixture,
    PreferenceBatch,
    Present,
    RandomResizedCrop,
    Ranks,
    Split,
    StoredBatch,
    Timed,
    TokenBatch,
    Where,
    aspect_buckets,
)
from forebay.torch.distill import LogitNormalTimes
from forebay.torch.images.image_batch import ImageBatch

HASHES = Path(__file__).with_name("batches.json")
MOST_BATCHES = 12
Batches = Iterable[Any]


class LabelNumbers(fb.RecipeHooks, msgspec.Struct, frozen=True, kw_only=True):
    """A layer with a number for every label of a packed row, as `fb.teachers.LogProbs` stores them."""

    kind: ClassVar[str] = "numbers"
    revision: ClassVar[int] = 1
    reads: ClassVar[tuple[str, ...]] = ("seq_lens",)

    def columns(self) -> tuple[Column, ...]:
        return (Column(name="ref_logps", dtype="float32", ragged=True),)

    def make(self, rows: Columns) -> fb.Rows:
        lengths = rows["seq_lens"]
        assert isinstance(lengths, Ragged)
        counts = [int(np.maximum(row.astype(np.int64) - 1, 0).sum()) for row in lengths]
        values = [np.arange(count, dtype=np.float32) / -8 for count in counts]
        return fb.Rows({"ref_logps": Ragged.of(values, np.dtype(np.float32))})


@cache
def folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="golden-batches-"))


@cache
def tokens(rows: int = 60, **fields: Any) -> fb.Cache:
    return fb.open_cache(token_cache(_fresh(), rows, **fields))


@cache
def images() -> fb.Cache:
    pictures = _fresh()
    return image_cache(_fresh() / "cache", write_pictures(pictures, 33))


@cache
def chat() -> fb.Cache:
    root = chat_cache(_fresh()).root
    fb.build(root, None, LabelNumbers(), workers=0)
    return fb.open_cache(root)


@cache
def preferences() -> fb.Cache:
    return preference_cache(_fresh())


@cache
def numbers() -> fb.Cache:
    return fb.open_cache(layered_cache(_fresh(), 40))


@cache
def prompts(is_taught: bool) -> fb.Cache:
    """Prompts; if taught, with a layer of encodings, and a timed layer that lacks the rows that end in `t`."""
    root = prompt_cache(_fresh())
    for teacher in (Letters(), Ramp(ends="t")) if is_taught else ():
        fb.build(root, None, TeacherRecipe(teacher=teacher, buckets=(0.1, 0.5, 0.9), batch_size=3, stored="float32"))
    return fb.open_cache(root)


def _fresh() -> Path:
    return Path(tempfile.mkdtemp(dir=folder()))


def loaded(source: Any, size: int = 6, *, epochs: int = 2, **options: Any) -> Batches:
    loader = Loader(source, global_batch_size=size, **options)
    return itertools.chain.from_iterable(iter(loader) for _ in range(epochs))


def resumed(source: Any, taken: int, size: int = 6, later: int = 4, **options: Any) -> Batches:
    """The batches of a loader with another batch size, from the state after `taken` batches on."""
    first = Loader(source, global_batch_size=size, **options)
    for _ in itertools.islice(first.forever(), taken):
        pass
    second = Loader(source, global_batch_size=later, **options)
    second.load_state_dict(first.state_dict())
    return second.forever()


def token_mixture(**options: Any) -> Mixture:
    caches = [tokens(), tokens(23, codec="zstd"), tokens(17, codec="lz4", chunk_rows=3)]
    return Mixture.of([Ingredient(each, weight=w) for each, w in zip(caches, (5, 3, 2), strict=True)], **options)


def prompt_mixture() -> Mixture:
    return Mixture.of([Ingredient(prompts(True), weight=1), Ingredient(prompts(False), weight=1)])


def buckets() -> Batches:
    sizes = [(32, 32), (48, 32), (32, 48)]
    loaders = [
        Loader(
            images(),
            global_batch_size=3,
            selection=bucket.selection(),
            collate=ImageBatch(images(), transforms=[bucket]),
        )
        for bucket in aspect_buckets(sizes)
    ]
    return BucketLoader(loaders, seed=3)


def odd(columns: Columns) -> Any:
    return np.asarray(columns["tokens"])[:, 0] % 2 == 1


CASES: Mapping[str, Callable[[], Batches]] = {
    "tokens": lambda: loaded(tokens()),
    "tokens, uint32": lambda: loaded(tokens(token_dtype="uint32")),
    "tokens, lz4": lambda: loaded(tokens(codec="lz4")),
    "tokens, zstd": lambda: loaded(tokens(codec="zstd")),
    "tokens, one row per block": lambda: loaded(tokens(rows_per_block=1, length_dtype="uint16")),
    "tokens, unshifted": lambda: loaded(tokens(), collate=TokenBatch(tokens(), labels="unshifted")),
    "tokens, no labels": lambda: loaded(tokens(), collate=TokenBatch(tokens(), labels=None, derive=())),
    "tokens, all derived": lambda: loaded(
        tokens(),
        collate=TokenBatch(
            tokens(), derive=["positions", "document_ids", "cu_seqlens", "num_label_tokens"], max_documents=6
        ),
    ),
    "tokens, cu_seqlens": lambda: loaded(tokens(), collate=TokenBatch(tokens(), derive=["cu_seqlens"])),
    "tokens, on device": lambda: loaded(tokens(), collate=TokenBatch(tokens(), on_device=True)),
    "tokens, stored": lambda: loaded(tokens(), collate=StoredBatch(tokens(), ["tokens", "documents"])),
    "tokens, extra columns": lambda: loaded(tokens(), columns=["documents", "row", "row_id"]),
    "tokens, seed 7, global": lambda: loaded(tokens(), seed=7, shuffle="global"),
    "tokens, window": lambda: loaded(tokens(), shuffle="window"),
    "tokens, window, zstd": lambda: loaded(tokens(codec="zstd"), shuffle="window", seed=1),
    "tokens, stored order": lambda: loaded(tokens(), shuffle=None),
    "tokens, filled": lambda: loaded(tokens(), 7, drop_last=False),
    "tokens, filled, rank 1 of 3": lambda: loaded(tokens(), 9, drop_last=False, ranks=Ranks(1, 3)),
    "tokens, rank 1 of 2": lambda: loaded(tokens(), 8, ranks=Ranks(1, 2)),
    "tokens, micro-batches": lambda: loaded(tokens(), 12, micro_batches=3),
    "tokens, restart": lambda: loaded(tokens(), 5, restart=True, drop_last=False),
    "tokens, train split": lambda: loaded(tokens(), selection=Split("train", 0.7)),
    "tokens, where": lambda: loaded(tokens(), 5, selection=Where("odd", odd, columns=["tokens"])),
    "tokens, without threads": lambda: loaded(tokens(), threads=0),
    "tokens, resumed": lambda: resumed(tokens(), 4),
    "tokens, resumed in epoch 1": lambda: resumed(tokens(), 13, shuffle="window"),
    "tokens, resumed, ranks": lambda: resumed(tokens(), 4, 8, 6, ranks=Ranks(1, 2)),
    "mixture": lambda: loaded(token_mixture()),
    "mixture, seed 5, changes": lambda: loaded(
        token_mixture(seed=5, epoch_rows=50, changes=[(30, [1, 1, 8])]), columns=["documents"], drop_last=False
    ),
    "mixture, resumed": lambda: resumed(token_mixture(), 9),
    "mixture, window": lambda: loaded(token_mixture(shuffle="window"), columns=["row_id"]),
    "chat": lambda: loaded(chat(), 3),
    "chat, weights": lambda: loaded(chat(), 3, collate=TokenBatch(chat(), train_on={"response": 1.0, "stop": 0.5})),
    "chat, filled": lambda: loaded(
        chat(), 4, drop_last=False, collate=TokenBatch(chat(), derive=["num_label_tokens", "positions"])
    ),
    "chat, log-probs": lambda: loaded(chat(), 3, collate=TokenBatch(chat(), log_probs=["ref_logps"])),
    "preferences": lambda: loaded(preferences(), 4),
    "preferences, packed, random": lambda: loaded(
        preferences(), 8, collate=PreferenceBatch(preferences(), layout="packed", pairs="random")
    ),
    "images": lambda: loaded(images(), 4),
    "images, flipped": lambda: loaded(
        images(), 4, seed=2, collate=ImageBatch(images(), flip=0.5, patch=8, masks="host", tags="indices")
    ),
    "images, float32": lambda: loaded(
        images(), 4, drop_last=False, collate=ImageBatch(images(), normalize="imagenet", dtype=torch.float32)
    ),
    "images, bfloat16, channels last, crops": lambda: loaded(
        images(),
        4,
        collate=ImageBatch(images(), dtype=torch.bfloat16, channels="last", transforms=[RandomResizedCrop(16)]),
    ),
    "images, buckets": buckets,
    "numbers": lambda: loaded(numbers()),
    "numbers, layer": lambda: loaded(
        numbers(), collate=StoredBatch(numbers(), ["number", "times"]), selection=Present("length")
    ),
    "prompts, encodings and features": lambda: loaded(
        prompts(True),
        4,
        collate=StoredBatch(prompts(True), ["data", "letters"]),
        columns=[Timed("ramp", LogitNormalTimes()), "row"],
    ),
    "prompts, mixture": lambda: loaded(
        prompt_mixture(), 5, collate=StoredBatch(prompt_mixture(), ["letters", "ramp"]), columns=[Timed("ramp", 0.4)]
    ),
}


def hashes(batches: Batches) -> dict[str, str]:
    """SHA-256 of every tensor, over all batches: type, shape and bytes."""
    digests: dict[str, Any] = {}
    for number, batch in enumerate(itertools.islice(batches, MOST_BATCHES)):
        for name, value in _tensors(batch):
            digest = digests.setdefault(name, hashlib.sha256())
            digest.update(f"{number} {value.dtype} {tuple(value.shape)} ".encode())
            digest.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return {name: digest.hexdigest() for name, digest in sorted(digests.items())}


def _tensors(batch: Any) -> Iterable[tuple[str, torch.Tensor]]:
    for part in batch if isinstance(batch, list) else [batch]:
        for name, value in part.items():
            yield name, value if isinstance(value, torch.Tensor) else torch.tensor(value)


@pytest.mark.parametrize("name", CASES)
def test_batches_are_those_of_the_golden_hashes(name: str) -> None:
    assert hashes(CASES[name]()) == json.loads(HASHES.read_text())[name]


if __name__ == "__main__":
    HASHES.write_text(json.dumps({name: hashes(make()) for name, make in CASES.items()}, indent=1) + "\n")
