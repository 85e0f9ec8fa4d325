"""The loader: the same sequence of rows for any ranks, threads and interruptions; batches as documented."""

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.helpers.hypothesis_profiles import scaled
from tests.helpers.layer_recipes import stored_cache as store_rows
from tests.helpers.token_caches import (
    document_lengths,
    interleaved,
    numbers_of,
    row_tokens,
    token_cache,
)

import forebay as fb
from forebay import masks
from forebay.columns import Column
from forebay.errors import EngineUnusable, NotFound
from forebay.feeding.selection import Split
from forebay.order.coins import Coins
from forebay.order.window import Window
from forebay.store import LocalStore
from forebay.torch import (
    ImageBatch,
    Ingredient,
    Loader,
    Mixture,
    PreferenceBatch,
    Ranks,
    StoredBatch,
    TokenBatch,
    document_block_mask,
)
from forebay.torch.attention.packed_attention import attend

LENGTH = 8
PLAIN, PACKED = 53, 61


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> dict[str, fb.Cache]:
    folder = tmp_path_factory.mktemp("loader")
    packed = token_cache(folder / "packed", PACKED, codec="zstd", chunk_rows=9)
    return {
        "plain": fb.open_cache(token_cache(folder / "plain", PLAIN)),
        "packed": fb.open_cache(packed),
        "tiny": fb.open_cache(token_cache(folder / "tiny", 1)),
    }


SHUFFLES: list[dict[str, Any]] = [
    {"shuffle": "global"},
    {"shuffle": None},
    {"shuffle": Window(rows=6, unit=2, chunks=3, lanes=4)},
    {"shuffle": "auto"},
]


@st.composite
def trainings(draw: st.DrawFn) -> dict[str, Any]:
    """Stages of one training: each with its own batch size, ranks and threads, cut off after some batches."""
    ranks = st.sampled_from([1, 2, 3, 4])
    stage = st.tuples(st.integers(1, 5), ranks, st.sampled_from([0, 1, 2]), st.integers(1, 9), st.integers(0, 12))
    return {
        "cache": draw(st.sampled_from(["plain", "packed", "tiny"])),
        "shuffle": draw(st.sampled_from(SHUFFLES)),
        "seed": draw(st.integers(0, 1000)),
        "stages": draw(st.lists(stage, min_size=1, max_size=4)),
    }


@settings(deadline=None, max_examples=scaled(60))
@given(training=trainings())
def test_interrupted_training_with_other_ranks_and_batch_sizes_sees_the_rows_of_an_uninterrupted_one(
    caches: dict[str, fb.Cache], training: dict[str, Any]
) -> None:
    cache, options = caches[training["cache"]], {"seed": training["seed"], **training["shuffle"]}
    state, rows = None, []
    for per_rank, world, threads, prefetch, batches in training["stages"]:
        loaders = [
            Loader(
                cache,
                global_batch_size=per_rank * world,
                threads=threads,
                prefetch=prefetch,
                drop_last=False,
                ranks=Ranks(rank, world),
                **options,
            )
            for rank in range(world)
        ]
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
        starts, by_rank = zip(*(take(loader, batches) for loader in loaders), strict=True)
        rows += [row for batch in interleaved(starts[0], by_rank) for row in batch]
        states = [loader.state_dict() for loader in loaders]
        assert states == [states[0]] * world
        state = states[0]
    assert rows == epochs(cache, options, len(rows))


@settings(deadline=None, max_examples=scaled(40))
@given(
    name=st.sampled_from(["plain", "packed", "tiny"]),
    shuffle=st.sampled_from(SHUFFLES),
    size=st.integers(1, 20),
    drop_last=st.booleans(),
    epoch=st.integers(0, 3),
)
def test_an_epoch_has_every_row_once_but_for_those_of_a_dropped_last_batch(
    caches: dict[str, fb.Cache], name: str, shuffle: dict[str, Any], size: int, drop_last: bool, epoch: int
) -> None:
    cache = caches[name]
    assume(not drop_last or len(cache) >= size)
    loader = Loader(cache, global_batch_size=size, drop_last=drop_last, **shuffle)
    loader.epoch = epoch
    batches = numbers_of(loader)
    assert len(batches) == len(cache) // size if drop_last else -(-len(cache) // size)
    rows = [row for batch in batches for row in batch]
    assert len(set(rows)) == len(rows) == (len(cache) // size * size if drop_last else len(cache))
    assert (loader.epoch, loader.position) == (epoch + 1, 0)


@pytest.mark.parametrize("labels", ["shifted", "unshifted"])
@pytest.mark.parametrize("name", ["plain", "packed"])
def test_a_batch_holds_what_the_masks_derive_from_the_stored_lengths(
    caches: dict[str, fb.Cache], name: str, labels: Any
) -> None:
    everything = ("positions", "document_ids", "cu_seqlens")
    loader = Loader(
        caches[name],
        global_batch_size=5,
        drop_last=False,
        collate=TokenBatch(caches[name], labels=labels, derive=everything),
    )
    for batch in loader:
        numbers = batch["tokens"][:, 0].tolist()
        lengths = [document_lengths(number, LENGTH) for number in numbers]
        tokens = np.stack([row_tokens(n, each, LENGTH) for n, each in zip(numbers, lengths, strict=True)])
        padded = np.zeros((len(lengths), max(map(len, lengths))), np.int32)
        for row, each in enumerate(lengths):
            padded[row, : len(each)] = each
        expected = {
            "tokens": tokens.astype(np.int64),
            "seq_lens": padded,
            "labels": masks.labels(tokens, padded, labels),
            "positions": masks.positions(padded, LENGTH).astype(np.int64),
            "document_ids": masks.document_ids(padded, LENGTH),
            "cu_seqlens": masks.cu_seqlens(padded, LENGTH),
        }
        assert batch.keys() == expected.keys() | {"row_weight", "max_seqlen"}
        assert batch["max_seqlen"] == int(masks.whole_lengths(padded, LENGTH).max())
        for key, values in expected.items():
            assert batch[key].dtype == torch.from_numpy(values).dtype, key
            assert np.array_equal(batch[key].numpy(), values), key


WAYS: list[Callable[[fb.Cache], dict[str, Any]]] = [
    lambda cache: {},
    lambda cache: {"collate": TokenBatch(cache, labels=None, derive=())},
    lambda cache: {
        "collate": TokenBatch(cache, labels="unshifted", derive=["document_ids", "cu_seqlens", "num_label_tokens"])
    },
    lambda cache: {"collate": TokenBatch(cache, on_device=True)},
    lambda cache: {"collate": TokenBatch(cache, max_documents=5, derive=["cu_seqlens"])},
    lambda cache: {"columns": ["documents", "row_id"], "drop_last": False},
    lambda cache: {"collate": TokenBatch(cache, loss_mask="weights", derive=["num_label_tokens"])},
    lambda cache: {"drop_last": False, "ranks": Ranks(3, 4)},
    lambda cache: {"collate": StoredBatch(cache, ["tokens", "seq_lens"])},
    lambda cache: {"collate": StoredBatch(cache, ["tokens", "weights"])},
]


@pytest.mark.parametrize("way", range(len(WAYS)))
@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_batches_are_the_same_with_any_number_of_threads(weighted: dict[str, fb.Cache], codec: str, way: int) -> None:
    def batches(threads: int) -> list[dict[str, Any]]:
        cache = fb.open_cache(weighted[codec].root)
        return list(Loader(cache, global_batch_size=4, threads=threads, **WAYS[way](cache)))

    for batch, expected in zip([*batches(1), *batches(3)], batches(0) * 2, strict=True):
        assert list(batch) == list(expected)
        for name, values in expected.items():
            if isinstance(values, int):
                assert batch[name] == values
            else:
                assert (batch[name].dtype, batch[name].shape) == (values.dtype, values.shape), name
                assert torch.equal(batch[name], values), name


@pytest.fixture(scope="module")
def weighted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, fb.Cache]:
    """Rows with a weight for each token, compressed and not."""
    rng, folder = np.random.default_rng(0), tmp_path_factory.mktemp("weighted")
    return {codec: stored_tokens(folder / codec, rng, codec) for codec in ("none", "zstd")}


def stored_tokens(folder: Path, rng: np.random.Generator, codec: Any, extra: int = 0) -> fb.Cache:
    """Three chunks of rows of random tokens; the documents of the last row are `extra` tokens longer than the row."""
    declared = [
        Column(name="tokens", dtype="uint16", shape=(LENGTH,), codec=codec, rows_per_block=2),
        Column(name="seq_lens", dtype="uint32", ragged=True, codec=codec, rows_per_block=2),
        Column(name="documents", dtype="uint32", shape=(2,), ragged=True),
        Column(name="weights", dtype="float32", shape=(LENGTH,)),
    ]
    chunks = []
    for rows in (7, 1, 6):
        lengths = [document_lengths(int(number), LENGTH) for number in rng.integers(0, 9, rows)]
        if len(chunks) == 2 and extra:
            lengths[-1] = np.array([LENGTH, extra], np.uint32)
        chunks.append(
            {
                "tokens": rng.integers(0, 65_536, (rows, LENGTH), np.uint16),
                "seq_lens": fb.Ragged.of(lengths, np.dtype("u4")),
                "documents": fb.Ragged.of(
                    [np.zeros((len(each), 2), np.uint32) for each in lengths], np.dtype("u4"), (2,)
                ),
                "weights": rng.integers(0, 3, (rows, LENGTH)).astype(np.float32),
            }
        )
    store_rows(LocalStore(folder), declared, chunks)
    return fb.open_cache(folder)


@pytest.mark.parametrize("threads", [0, 1, 2])
def test_documents_that_are_longer_than_their_row_are_refused(tmp_path: Path, threads: int) -> None:
    cache = stored_tokens(tmp_path / "cache", np.random.default_rng(0), "none", extra=1)
    batches = iter(Loader(cache, global_batch_size=2, shuffle=None, threads=threads))
    assert len(list(islice(batches, 6))) == 6
    with pytest.raises(ValueError, match=f"row 1 have {LENGTH + 1} tokens but a row holds {LENGTH}"):
        next(batches)


def test_bfloat16_columns_are_bfloat16_tensors(tmp_path: Path) -> None:
    column = Column(name="x", dtype="bfloat16", shape=(2,))
    values = np.arange(6, dtype=np.float32).astype(column.array_dtype).reshape(3, 2)
    store_rows(LocalStore(tmp_path), [column], [{"x": values}])
    (batch,) = Loader(tmp_path, global_batch_size=3, shuffle=None)
    assert batch["x"].dtype == torch.bfloat16
    assert batch["x"].tolist() == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize("name", ["plain", "packed"])
def test_the_last_batch_has_one_shape_on_every_rank(caches: dict[str, fb.Cache], name: str) -> None:
    cache, everything = caches[name], ("positions", "document_ids", "cu_seqlens")
    collate = TokenBatch(cache, derive=everything)
    by_rank = [
        list(Loader(cache, global_batch_size=12, drop_last=False, ranks=Ranks(rank, 4), collate=collate))
        for rank in range(4)
    ]
    assert {len(batches) for batches in by_rank} == {-(-len(cache) // 12)}
    assert {len(batches[-1]["tokens"]) for batches in by_rank} == {-(-(len(cache) % 12) // 4)}
    weights = torch.cat([batch["row_weight"] for batches in by_rank for batch in batches])
    assert weights.dtype == torch.float32
    assert weights.sum() == len(cache), "a row of the cache each"
    seen = [batch["tokens"][batch["row_weight"] == 1, 0] for batches in by_rank for batch in batches]
    assert sorted(torch.cat(seen).tolist()) == list(range(len(cache)))


def test_a_row_that_fills_a_batch_is_padding_without_a_loss(caches: dict[str, fb.Cache]) -> None:
    everything = ("positions", "document_ids", "cu_seqlens")
    collate = TokenBatch(caches["plain"], derive=everything)
    options: dict[str, Any] = {"global_batch_size": 4, "drop_last": False, "shuffle": None, "collate": collate}
    *_, last = Loader(caches["plain"], ranks=Ranks(3, 4), **options)
    assert last["row_weight"].tolist() == [0]
    assert last["tokens"].tolist() == [[0] * LENGTH]
    assert last["labels"].tolist() == [[-100] * LENGTH]
    assert last["positions"].tolist() == [list(range(LENGTH))]
    assert last["cu_seqlens"].tolist() == [0, LENGTH]
    mask = document_block_mask(last["seq_lens"], LENGTH)
    heads = torch.randn(1, 1, LENGTH, 8)
    assert attend(heads, heads, heads, mask, "dense").isfinite().all()
    loss = torch.nn.functional.cross_entropy(torch.randn(LENGTH, 9), last["labels"][0], reduction="sum")
    assert loss == 0


def test_ranks_are_those_of_the_environment(caches: dict[str, fb.Cache], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    by_number = fb.open_cache(caches["plain"].root, generation=0)
    assert numbers_of(Loader(by_number, global_batch_size=4, shuffle=None))[0] == [1, 3]
    with pytest.raises(ValueError, match=r"RANK=1 and WORLD_SIZE=2 are set, but .* has no process group"):
        Loader(caches["plain"], global_batch_size=4, shuffle=None)
    with pytest.raises(ValueError, match=r"WORLD_SIZE=2 are set, but .* no process group to sum over; call init_pro"):
        Loader(by_number, global_batch_size=4).sum_over_ranks(torch.ones(()))
    with pytest.raises(ValueError, match="or open one by number"):
        Loader(Mixture.of([Ingredient(caches["plain"], weight=1)]), global_batch_size=4)
    monkeypatch.setenv("RANK", "x")
    with pytest.raises(ValueError, match="the environment variable RANK is 'x'; set a whole number"):
        Loader(by_number, global_batch_size=4)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"shuffle": "some"}, r"shuffle must be .* \(got 'some'\)"),
        ({"shuffle": "gobal"}, r"\(got 'gobal'\); did you mean 'global'\?"),
        ({"growth": "always"}, r"growth must be 'pinned', 'epoch' or 'within' \(got 'always'\)$"),
        ({"growth": "epcoh"}, r"did you mean 'epoch'\?"),
        ({"micro_batches": 0}, r"micro_batches must be a whole number of at least 1 \(got 0\)"),
        (
            {"global_batch_size": 8, "micro_batches": 3, "ranks": Ranks(0, 2)},
            "divide the rows of a rank, 4 of global_batch_size=8",
        ),
        ({"fetch_ahead": -1}, r"fetch_ahead must be a whole number of at least 0 \(got -1\)"),
        ({"threads": -1}, r"threads must be a whole number of at least 0 \(got -1\)"),
        ({"prefetch": 0}, r"prefetch must be a whole number of at least 1 \(got 0\)"),
        ({"ranks": Ranks(0, 2), "growth": "epoch"}, "ranks that agree on a generation"),
        ({"global_batch_size": 10, "ranks": Ranks(0, 4)}, "must be a multiple of the world size 4"),
        ({"global_batch_size": 10**6}, r"global_batch_size \(1,000,000\) exceeds the epoch \(53 rows\)"),
        ({"ranks": "dp"}, r"ranks is 'dp'; pass Ranks\(rank, world_size\), a process group or mesh"),
        ({"transform": 5}, r"transform is 5; pass a function \(batch, coins\) -> batch"),
        ({"on_growth": 5}, "on_growth is 5; pass a function that takes a Growth"),
        ({"batch_size": 8}, r"^Loader has no parameter 'batch_size'; did you mean 'global_batch_size'\?$"),
        *(
            ({name: True}, rf"{name} must be a whole number of at least \d \(got True\)")
            for name in ("threads", "prefetch", "seed", "global_batch_size")
        ),
    ],
)
def test_options_that_make_no_sense_are_refused_in_the_constructor(
    caches: dict[str, fb.Cache], options: dict[str, Any], problem: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=problem):
        Loader(caches["plain"].root, **{"global_batch_size": 4, **options})


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"labels": "last"}, "labels must be 'shifted', 'unshifted' or None"),
        ({"labels": "shift"}, r"did you mean 'shifted'\?"),
        ({"derive": ["ids"]}, r"each name of derive must be .* \(got 'ids'\)"),
        ({"derive": ["position"]}, r"did you mean 'positions'\?"),
        ({"derive": "positions"}, "derive is 'positions'; pass a list of names"),
        ({"max_documents": 2.5}, "max_documents must be a whole number of at least 1"),
        ({"loss_mask": "tokens"}, "loss_mask is 'tokens', which has no weights"),
        ({"loss_mask": "documents"}, "rows of 'documents' are ragged; a loss_mask has one number per token"),
        ({"labels": None, "derive": ["num_label_tokens"]}, r"^derive=\['num_label_tokens'\] needs labels"),
        ({"labels": None, "loss_mask": "weights"}, "^loss_mask='weights' needs labels"),
        ({"on_device": True, "labels": "unshifted"}, "labels and derive have no effect with on_device=True"),
        ({"on_device": True, "derive": ["cu_seqlens"]}, "labels and derive have no effect with on_device=True"),
        ({"on_device": True, "loss_mask": "weights"}, "rows with spans need on_device=False"),
    ],
)
def test_options_of_token_batches_that_make_no_sense_are_refused(
    weighted: dict[str, fb.Cache], options: dict[str, Any], problem: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=problem):
        TokenBatch(weighted["none"], **options)


@pytest.mark.parametrize("collate", [TokenBatch, StoredBatch, PreferenceBatch, ImageBatch])
def test_a_collate_is_made_of_a_cache_not_of_a_path(caches: dict[str, fb.Cache], collate: Any) -> None:
    with pytest.raises(TypeError, match=r"an open cache|open one with fb\.open_cache"):
        collate(caches["plain"].root)


def test_a_stored_batch_of_a_column_that_is_nowhere_is_refused(caches: dict[str, fb.Cache]) -> None:
    with pytest.raises(NotFound, match="no column 'nowhere'"):
        StoredBatch(caches["plain"], ["nowhere"])


def test_a_rank_is_below_the_world_size() -> None:
    with pytest.raises(ValueError, match=r"rank must be from 0 to 1 with world_size 2 \(got 2\)"):
        Ranks(2, 2)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> fb.Cache:
    """Rows that compress to nothing, and are more than a window when they are decoded."""
    fields = {"codec": "zstd", "sequence_length": 1 << 16, "chunk_rows": 100}
    return fb.open_cache(token_cache(tmp_path_factory.mktemp("large"), 800, **fields))


def test_auto_is_global_where_rows_are_mapped_or_stay_decoded_and_window_else(
    caches: dict[str, fb.Cache], large: fb.Cache
) -> None:
    assert Loader(caches["plain"], global_batch_size=4).state_dict()["stream"]["shuffle"] == "global"
    assert Loader(caches["packed"], global_batch_size=4).state_dict()["stream"]["shuffle"] == "global"
    packed = Loader(large, global_batch_size=4).state_dict()["stream"]
    assert packed["shuffle"] == "window"
    assert packed["window"]["unit"] == 2


@pytest.mark.parametrize("shuffle", ["auto", "window"])
def test_the_order_does_not_depend_on_the_columns_that_are_read(
    caches: dict[str, fb.Cache], large: fb.Cache, shuffle: Any
) -> None:
    for cache in (*caches.values(), large):
        options = {"global_batch_size": 1, "shuffle": shuffle}
        named = [Loader(cache, collate=StoredBatch(cache, [name]), **options).stream for name in ("tokens", "seq_lens")]
        orders = [Loader(cache, **options).stream, *named]
        positions = np.arange(len(cache))
        rows = [order.locate(0, positions).rows.tolist() for order in orders]
        assert rows[0] == rows[1] == rows[2]


def test_rows_that_do_not_stay_decoded_are_not_shuffled_globally_unless_asked_for(caches: dict[str, fb.Cache]) -> None:
    small = fb.open_cache(caches["packed"].root, memory=500)
    with pytest.raises(EngineUnusable, match="open the cache with memory="):
        Loader(small, global_batch_size=4)
    Loader(small, global_batch_size=4, shuffle="global")


def test_a_selection_limits_the_rows_and_leaves_the_rest_to_the_other_side(caches: dict[str, fb.Cache]) -> None:
    for name in ("plain", "packed"):
        sides = [
            {
                row
                for batch in numbers_of(Loader(caches[name], global_batch_size=1, selection=Split(side, 0.5)))
                for row in batch
            }
            for side in ("train", "validation")
        ]
        assert not sides[0] & sides[1]
        assert sides[0] | sides[1] == set(range(len(caches[name])))


def test_a_transform_is_given_the_coins_of_its_rows_whatever_the_ranks(caches: dict[str, fb.Cache]) -> None:
    def with_coins(batch: dict[str, torch.Tensor], coins: Coins) -> dict[str, torch.Tensor]:
        return batch | {"coin": torch.from_numpy(coins.uniform("test"))}

    def coins_of(world: int, threads: int) -> dict[int, float]:
        found: dict[int, float] = {}
        for rank in range(world):
            loader = Loader(
                caches["plain"], global_batch_size=4, transform=with_coins, threads=threads, ranks=Ranks(rank, world)
            )
            for batch in loader:
                found |= dict(zip(batch["tokens"][:, 0].tolist(), batch["coin"].tolist(), strict=True))
        return found

    alone = coins_of(1, 0)
    assert coins_of(2, 2) == alone
    assert len(set(alone.values())) == len(alone)


def test_only_the_newest_iterator_goes_on(caches: dict[str, fb.Cache]) -> None:
    loader = Loader(caches["plain"], global_batch_size=4)
    first = iter(loader)
    next(first)
    second = iter(loader)
    next(second)
    with pytest.raises(RuntimeError, match="superseded by a later iter"):
        next(first)
    assert loader.position == 8
    assert len(list(second)) == 11


def test_a_resume_that_leaves_no_batch_of_an_epoch_begins_the_next(caches: dict[str, fb.Cache]) -> None:
    loader = Loader(caches["plain"], global_batch_size=4)
    list(islice(loader, 11))
    larger = Loader(caches["plain"], global_batch_size=16)
    larger.load_state_dict(loader.state_dict())
    assert (larger.epoch, larger.position) == (1, 0)
    whole = Loader(caches["plain"], global_batch_size=16)
    list(whole)
    assert numbers_of(larger) == numbers_of(whole)


@pytest.mark.parametrize("shuffle", [None, "global"])
def test_with_restart_every_iteration_has_the_same_batches_from_the_start(
    caches: dict[str, fb.Cache], shuffle: Any
) -> None:
    loader = Loader(caches["plain"], global_batch_size=4, shuffle=shuffle, drop_last=False, restart=True)
    whole = numbers_of(loader)
    assert len(whole) == len(loader) == 14
    list(islice(loader, 2))
    assert numbers_of(loader) == numbers_of(islice(loader, 14)) == whole
    state = loader.state_dict()
    next(iter(loader))
    assert loader.state_dict() == state
    assert (state["epoch"], state["position"]) == (0, 0)
    loader.load_state_dict({**state, "epoch": 3, "position": 8})
    assert numbers_of(loader) == whole


def test_quality_is_reported(caches: dict[str, fb.Cache]) -> None:
    assert Loader(caches["plain"], global_batch_size=8).shuffle_quality().chunks > 0.8
    assert Loader(caches["plain"], global_batch_size=8, shuffle=None).shuffle_quality().chunks < 0.5


def take(loader: Loader, batches: int) -> tuple[list[int], list[list[int]]]:
    """Where the next so many batches begin, and their rows; over as many epochs as that takes."""
    starts: list[int] = []
    taken: list[list[int]] = []
    while len(taken) < batches:
        start = loader.position
        for batch in loader:
            starts.append(start)
            taken.append(batch["tokens"][batch["row_weight"] > 0, 0].tolist())
            start = loader.position
            if len(taken) == batches:
                break
    return starts, taken


def epochs(cache: fb.Cache, options: dict[str, Any], count: int) -> list[int]:
    """The first so many rows of the uninterrupted sequence."""
    loader = Loader(cache, global_batch_size=1, threads=0, drop_last=False, **options)
    rows: list[int] = []
    while len(rows) < count:
        rows += [row for batch in numbers_of(loader) for row in batch]
    return rows[:count]
