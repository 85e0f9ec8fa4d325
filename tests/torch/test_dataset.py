"""CacheDataset: the same rows in this process and in any kind of worker, selections and coins included."""

import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.helpers.batch_transforms import tell_coins
from tests.helpers.builders import script_environment
from tests.helpers.layer_recipes import number_cache
from tests.helpers.token_caches import grow_cache, token_cache
from torch.utils.data import ConcatDataset, DataLoader

import forebay as fb
from forebay.errors import NotFound
from forebay.torch import CacheDataset, Split, TokenBatch

HALF = Split("train", fraction=0.5)

pytestmark = pytest.mark.filterwarnings(
    "ignore:the (train|validation) side of .* has .* of the rows instead of:UserWarning"
)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> fb.Cache:
    return fb.open_cache(token_cache(tmp_path_factory.mktemp("tokens"), 60))


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> fb.Cache:
    return fb.open_cache(number_cache(tmp_path_factory.mktemp("numbers"), 40))


def selected(cache: fb.Cache) -> list[int]:
    """The rows of the half; in both caches a row tells its own number."""
    chosen = HALF.select(cache)
    return chosen.rows(np.arange(len(chosen))).tolist()


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_a_row_of_tokens_is_ready_for_training(tokens: fb.Cache) -> None:
    dataset = CacheDataset(tokens, collate=TokenBatch(tokens, derive=("positions", "document_ids")))
    assert len(dataset) == 60
    row = dataset[7]
    seq_lens = [row["seq_lens"].tolist()]
    assert row["tokens"].dtype == torch.int64
    assert row["tokens"].tolist() == tokens[7]["tokens"].tolist()
    assert row["labels"].tolist() == fb.masks.labels(row["tokens"][None].numpy(), seq_lens)[0].tolist()
    assert row["positions"].tolist() == fb.masks.positions(seq_lens, 8)[0].tolist()
    assert row["document_ids"].tolist() == fb.masks.document_ids(seq_lens, 8)[0].tolist()
    aligned = CacheDataset(tokens, collate=TokenBatch(tokens, labels="unshifted", derive=()))[7]
    assert aligned.keys() == {"tokens", "labels", "seq_lens"}
    assert aligned["labels"].tolist() == fb.masks.labels(row["tokens"][None].numpy(), seq_lens, "unshifted")[0].tolist()


def test_many_rows_at_once_are_the_rows_one_by_one(tokens: fb.Cache) -> None:
    dataset = CacheDataset(tokens, names={"tokens": "tokens", "labels": "labels", "positions": "positions"})
    indices = [5, 0, 59, 5, -1]
    together = dataset.__getitems__(indices)
    assert [index % 60 for index in indices] == [int(row["tokens"][0]) for row in together]
    assert all(same(row, dataset[index]) for row, index in zip(together, indices, strict=True))


def test_other_rows_are_their_columns_ragged_ones_as_long_as_they_are(numbers: fb.Cache) -> None:
    dataset = CacheDataset(numbers)
    row = dataset[12]
    assert row.keys() == {"number", "vector", "text"}
    assert int(row["number"]) == 12
    assert row["vector"].tolist() == [12.0, 6.0]
    assert bytes(row["text"].numpy()) == b"000012"
    assert [bytes(row["text"].numpy()) for row in dataset.__getitems__([3, 39])] == [b"000003", b"000039"]
    assert CacheDataset(numbers, columns=["vector"])[1].keys() == {"vector"}


def test_names_choose_and_rename(tokens: fb.Cache) -> None:
    dataset = CacheDataset(tokens, names={"input_ids": "tokens", "position_ids": "positions"})
    assert dataset[3].keys() == {"input_ids", "position_ids"}
    with pytest.raises(NotFound, match=r"(?s)no column 'token'.*it has: labels, positions, seq_lens, tokens"):
        CacheDataset(tokens, names={"input_ids": "token"})[0]
    with pytest.raises(TypeError, match=r"names must be a dict, .*: the model's names first \(got "):
        CacheDataset(tokens, names=["tokens"])  # type: ignore[arg-type]


@pytest.mark.parametrize("index", [60, -61, 10**12])
def test_a_row_that_is_not_there_is_an_index_error(tokens: fb.Cache, index: int) -> None:
    with pytest.raises(IndexError, match=f"there is no row {index}; .* has 60 rows"):
        CacheDataset(tokens)[index]


@pytest.mark.parametrize("context", [None, "fork", pytest.param("forkserver", marks=pytest.mark.long)])
def test_workers_give_the_selected_rows_in_order(tokens: fb.Cache, numbers: fb.Cache, context: str | None) -> None:
    """Whole chunks of the one, single rows of the other; spawned workers are below."""
    halves = [CacheDataset(tokens, selection=HALF), CacheDataset(numbers, selection=HALF)]
    workers = {"num_workers": 2 if context else 0, "multiprocessing_context": context}
    rows = [row for batch in DataLoader(ConcatDataset(halves), 4, collate_fn=list, **workers) for row in batch]
    found = [int(row["number"] if "number" in row else row["tokens"][0]) for row in rows]
    expected = [selected(cache) for cache in (tokens, numbers)]
    assert [len(half) for half in halves] == [len(rows) for rows in expected]
    assert found == [row for rows in expected for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_that_live_on_draw_the_coins_of_the_epoch(tokens: fb.Cache, context: str) -> None:
    dataset = CacheDataset(tokens, selection=HALF, transform=tell_coins, names={"row": "row", "coin": "coin"})
    loader = DataLoader(dataset, batch_size=7, num_workers=2, persistent_workers=True, multiprocessing_context=context)
    coins = {}
    for epoch in (0, 5):
        dataset.set_epoch(epoch)
        batches = list(loader)
        assert torch.cat([batch["row"] for batch in batches]).tolist() == selected(tokens)
        coins[epoch] = torch.cat([batch["coin"] for batch in batches]).tolist()
        assert coins[epoch] == [float(dataset[row]["coin"]) for row in range(len(dataset))]
    assert coins[0] != coins[5]


def test_a_row_keeps_its_coins_when_the_cache_grows_and_when_it_is_selected(tmp_path: Path) -> None:
    root = token_cache(tmp_path, 30)

    def coins(selection: Split | None = None) -> dict[int, float]:
        dataset = CacheDataset(fb.open_cache(root), selection=selection, transform=tell_coins)
        return {int(row["row"]): float(row["coin"]) for row in dataset.__getitems__(range(len(dataset)))}

    before = coins()
    grow_cache(tmp_path, 30, 20)
    after = coins()
    assert len(set(after.values())) == 50
    assert {row: after[row] for row in before} == before
    chosen = coins(HALF)
    assert {row: after[row] for row in chosen} == chosen


def test_pickled_it_is_small_and_gives_the_same_rows(tokens: fb.Cache, numbers: fb.Cache) -> None:
    for cache in (tokens, numbers):
        dataset = CacheDataset(cache, selection=HALF)
        dataset.set_epoch(4)
        packed = pickle.dumps(dataset)
        again = pickle.loads(packed)
        assert len(packed) < 3000
        assert (len(again), again.epoch) == (len(dataset), 4)
        assert all(same(again[row], dataset[row]) for row in range(len(dataset)))


@pytest.mark.slow
def test_grain_takes_it_as_a_source_of_its_own(tokens: fb.Cache) -> None:
    """In a process of its own: Grain starts threads and a server at import."""
    code = f"""
import grain, numpy as np, forebay as fb
from forebay.torch import CacheDataset, Split
names = {{"tokens": "tokens", "labels": "labels"}}
source = CacheDataset(fb.open_cache({tokens.root!r}), selection=Split("train", fraction=0.5), names=names)
assert isinstance(source, grain.sources.RandomAccessDataSource)
dataset = grain.MapDataset.source(source).seed(0).shuffle().batch(4)
batches = list(dataset.to_iter_dataset())
assert all(batch["tokens"].shape[1] == 8 for batch in batches)
print(sorted(int(row[0]) for batch in batches for row in np.asarray(batch["tokens"])))
"""
    run = subprocess.run([sys.executable, "-c", code], env=script_environment(), capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == str(selected(tokens))
