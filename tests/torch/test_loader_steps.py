"""Steps of training: batches made ahead across epochs, endless iteration, micro-batches."""

import threading
import time
from itertools import islice
from pathlib import Path

import pytest
import torch
from tests.helpers.token_caches import numbers_of, token_cache

import forebay as fb
from forebay.order.coins import Coins
from forebay.torch import Ingredient, Loader, Mixture, Ranks

ROWS, BATCH = 26, 4
Batch = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> fb.Cache:
    return fb.open_cache(token_cache(tmp_path_factory.mktemp("steps"), ROWS))


class Made:
    """A transform that counts the batches that were made."""

    def __init__(self) -> None:
        self.count, self._changed = 0, threading.Condition()

    def __call__(self, batch: Batch, coins: Coins) -> Batch:
        with self._changed:
            self.count += 1
            self._changed.notify_all()
        return batch

    def reaches(self, count: int) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self.count >= count, timeout=600)


def test_the_next_batch_and_the_next_epoch_are_begun_during_a_step(cache: fb.Cache) -> None:
    made = Made()
    batches = iter(Loader(cache, global_batch_size=BATCH, transform=made, prefetch=1))
    next(batches)
    assert made.reaches(2)
    following = Made()
    epoch = list(loader := Loader(cache, global_batch_size=BATCH, transform=following))
    assert following.reaches(len(epoch) + 1)
    assert (loader.epoch, loader.position) == (1, 0)


@pytest.mark.parametrize("options", [{}, {"drop_last": False}, {"threads": 0}, {"threads": 3, "prefetch": 1}])
def test_epochs_that_are_made_ahead_are_those_of_a_loader_that_starts_there(
    cache: fb.Cache, options: dict[str, bool | int]
) -> None:
    mixture = Mixture.of([Ingredient(cache, weight=0.7), Ingredient(cache, weight=0.3)], seed=2)
    for source in (cache, mixture):
        loader = Loader(source, global_batch_size=BATCH, **options)  # type: ignore[arg-type]
        states, epochs = [], []
        for epoch in range(4):
            states.append(loader.state_dict())
            epochs.append(numbers_of(islice(loader, len(loader)) if epoch % 2 else loader))  # counted, or to the end
            assert (loader.epoch, loader.position) == (epoch + 1, 0)
        assert len({str(each) for each in epochs}) == 4
        for state, expected in zip(states, epochs, strict=True):
            again = Loader(source, global_batch_size=BATCH, threads=0, drop_last=options.get("drop_last", True))
            again.load_state_dict(state)
            assert numbers_of(again) == expected


def test_a_loaded_state_drops_what_was_made_ahead(cache: fb.Cache) -> None:
    loader = Loader(cache, global_batch_size=BATCH)
    start = loader.state_dict()
    first = numbers_of(loader)
    loader.load_state_dict(start)
    assert numbers_of(loader) == first


def test_forever_continues_with_the_next_epoch(cache: fb.Cache) -> None:
    loader, plain = (Loader(cache, global_batch_size=BATCH) for _ in range(2))
    steps = numbers_of(loader.forever(max_steps=15))
    assert steps == [numbers for _ in range(3) for numbers in numbers_of(plain)][:15]
    assert (loader.epoch, loader.position) == (2, 3 * BATCH)
    assert numbers_of(loader.forever(max_steps=0)) == []
    with pytest.raises(ValueError, match=r"max_steps must be a whole number of at least 0 \(got -1\)"):
        loader.forever(max_steps=-1)
    assert loader.position == 3 * BATCH


def test_micro_batches_are_the_rows_of_a_batch(cache: fb.Cache) -> None:
    whole = Loader(cache, global_batch_size=BATCH, drop_last=False)
    parts = Loader(cache, global_batch_size=BATCH, drop_last=False, micro_batches=2)
    assert len(parts) == len(whole)
    for batch, micro_batches in zip(whole, parts, strict=True):
        assert parts.state_dict() == whole.state_dict()
        assert [len(each["tokens"]) for each in micro_batches] == ([2, 2] if len(batch["tokens"]) == BATCH else [2])
        for name in ("tokens", "labels", "positions", "row_weight"):
            assert torch.equal(torch.cat([each[name] for each in micro_batches]), batch[name]), name


def test_micro_batches_of_ranks_are_those_of_one_process(cache: fb.Cache) -> None:
    whole = numbers_of(Loader(cache, global_batch_size=8))
    shares = [list(Loader(cache, global_batch_size=8, micro_batches=2, ranks=Ranks(rank, 2))) for rank in (0, 1)]
    for batch, *ranks in zip(whole, *shares, strict=True):
        rows = [numbers_of(micro_batches) for micro_batches in ranks]
        assert [row for micro in zip(*rows, strict=True) for pair in zip(*micro, strict=True) for row in pair] == batch


@pytest.mark.parametrize("prefetch", [1, 5, 24, None])
@pytest.mark.parametrize("options", [{}, {"drop_last": False}, {"micro_batches": 2}])
def test_threads_that_share_groups_make_the_batches_of_none(
    tmp_path: Path, prefetch: int | None, options: dict[str, object]
) -> None:
    cache = fb.open_cache(token_cache(tmp_path, 333, chunk_rows=50))

    def now_and_then_slow(batch: dict[str, torch.Tensor], coins: Coins) -> dict[str, torch.Tensor]:
        if int(batch["row"][0]) % 5 == 0:
            time.sleep(0.002)  # so long that what was made so far is handed on
        return batch

    def rows(threads: int) -> list[list[int]]:
        loader = Loader(
            cache,
            global_batch_size=4,
            transform=now_and_then_slow,
            threads=threads,
            prefetch=prefetch,
            columns=["row"],
            **options,
        )
        steps = ([step] if isinstance(step, dict) else step for step in loader.forever(190))
        return [batch["row"].tolist() for step in steps for batch in step]

    alone = rows(0)
    assert len(alone) >= 190
    for threads in (1, 2, 3):
        assert rows(threads) == alone
