"""A collate of one's own: rows as they lie in the cache, the coins of their samples, batches of any kind."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers.layer_recipes import LengthLayer, number_cache
from tests.helpers.token_caches import token_cache

import forebay as fb
from forebay.order.coins import Coins, sample_keys
from forebay.torch import CacheDataset, Collate, Filled, Ingredient, Loader, Mixture, Table
from forebay.torch.batches import Batch, Buffers

ROWS = 30


class LastBytes(Collate):
    """The number of a row, the last bytes of its text, and its coin."""

    columns = ("number", "text")

    def collate(self, rows: Table, coins: Coins, buffers: Buffers) -> Batch:
        texts = [bytes(text) for text in rows["text"]]
        assert texts == [bytes(text) for text in rows["text"]]  # rows can be gone through again
        last = torch.tensor([list(text[-2:]) for text in texts]).reshape(len(texts), 2)
        numbers = torch.from_numpy(np.asarray(rows["number"]))
        return {"number": numbers, "last": last, "coin": torch.from_numpy(coins.uniform("told"))}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> fb.Cache:
    root = number_cache(tmp_path_factory.mktemp("numbers"), ROWS)
    fb.build(root, None, LengthLayer(), workers=0)
    return fb.open_cache(root, layers=["length"])


def expected(numbers: list[int], epoch: int = 0, seed: int = 0) -> dict[str, Any]:
    texts = [b"%06d" % number for number in numbers]
    return {
        "number": numbers,
        "last": [list(text[-2:]) for text in texts],
        "coin": Coins(seed, epoch, sample_keys(texts)).uniform("told").tolist(),
    }


def told(batch: Batch) -> dict[str, Any]:
    return {name: values.tolist() for name, values in batch.items()}


@pytest.mark.parametrize("threads", [0, 1, 2])
def test_a_loader_gives_what_the_collate_makes_of_its_rows(cache: fb.Cache, threads: int) -> None:
    collate: Collate = LastBytes()
    loader = Loader(cache, global_batch_size=7, seed=4, drop_last=False, threads=threads, collate=collate)
    seen: list[int] = []
    for epoch in (0, 1):
        for batch in loader:
            assert batch.pop("row_weight").tolist() == [1] * len(batch["number"])
            assert told(batch) == expected(batch["number"].tolist(), epoch, 4)
            seen += batch["number"].tolist()
    assert sorted(seen) == sorted([*range(ROWS)] * 2)


def test_columns_and_a_transform_come_on_top_with_the_same_coins(cache: fb.Cache) -> None:
    def again(batch: Batch, coins: Coins) -> Batch:
        return batch | {"again": torch.from_numpy(coins.uniform("told"))}

    loader = Loader(cache, global_batch_size=5, collate=LastBytes(), columns=[Filled("times", 0)], transform=again)
    for batch in loader:
        assert batch["times"].tolist() == (2 * batch["number"]).where(batch["length.present"], 0).tolist()
        assert torch.equal(batch["again"], batch["coin"])


def test_a_dataset_gives_the_rows_of_such_batches(cache: fb.Cache) -> None:
    dataset = CacheDataset(cache, collate=LastBytes(), seed=2)
    dataset.set_epoch(3)
    rows = dataset.__getitems__([17, 3, 4])
    whole = expected([17, 3, 4], 3, 2)
    assert [told(row) for row in rows] == [{name: whole[name][at] for name in whole} for at in range(3)]


def test_a_mixture_hands_over_rows_of_all_its_caches_with_coins_of_their_own(cache: fb.Cache, tmp_path: Path) -> None:
    other = fb.open_cache(number_cache(tmp_path, 10, codec="none"))
    mixture = Mixture.of([Ingredient(cache, repeat=1), Ingredient(other, repeat=3)], seed=6)
    coins: dict[tuple[int, int], set[float]] = {}
    for batch in Loader(mixture, global_batch_size=10, collate=LastBytes(), threads=2):
        assert batch["last"].tolist() == expected(batch["number"].tolist())["last"]
        for number, source, coin in zip(
            *(batch[name].tolist() for name in ("number", "dataset_id", "coin")), strict=True
        ):
            coins.setdefault((source, number), set()).add(coin)
    assert all(coins[0, number] == set(expected([number], 0, 6)["coin"]) for number in range(ROWS))
    assert all(len(coins[1, number]) == 3 and not coins[1, number] & coins[0, number] for number in range(10))


def test_where_rows_have_no_sample_ids_coins_go_by_row(tmp_path: Path) -> None:
    class Numbers(Collate):
        columns = ("tokens",)

        def collate(self, rows: Table, coins: Coins, buffers: Buffers) -> Batch:
            first = np.asarray(rows["tokens"])[:, 0].astype(np.int64)
            return {"row": torch.from_numpy(first), "coin": torch.from_numpy(coins.uniform("told"))}

    tokens = fb.open_cache(token_cache(tmp_path, 12))

    def coins_of(**options: Any) -> dict[int, float]:
        batches = map(told, Loader(tokens, global_batch_size=4, **options))
        return {row: coin for batch in batches for row, coin in zip(batch["row"], batch["coin"], strict=True)}

    def tell(batch: Batch, coins: Coins) -> Batch:
        return {"row": batch["tokens"][:, 0], "coin": torch.from_numpy(coins.uniform("told"))}

    assert coins_of(collate=Numbers()) == coins_of(transform=tell)
    assert len(set(coins_of(transform=tell).values())) == 12
