"""A cache that grows under a loader, or between a checkpoint and its resumption: no row twice, none left out."""

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.hypothesis_profiles import scaled
from tests.helpers.token_caches import grow_cache, numbers_of, token_cache

import forebay as fb
from forebay.feeding.selection import Split
from forebay.order.window import Window
from forebay.torch import Growth, Loader

OLD, NEW = 23, 37  # rows
NEWEST = 1


@pytest.fixture(scope="module", params=["none", "zstd"])
def grown(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A cache of 23 rows in generation 0, of 37 in the newest."""
    folder = tmp_path_factory.mktemp("grown")
    token_cache(folder, OLD, codec=request.param)
    grow_cache(folder, OLD, NEW - OLD)
    return folder / "cache"


def open_old(root: Path) -> fb.Cache:
    return fb.open_cache(root, generation=0)


def test_a_running_loader_keeps_to_its_generation(grown: Path) -> None:
    loader = Loader(open_old(grown), global_batch_size=1)
    for _ in range(2):
        assert sorted(rows(loader)) == list(range(OLD))
    assert loader.grown is None


def test_at_the_end_of_an_epoch_it_moves_to_the_newest(grown: Path) -> None:
    reports: list[Growth] = []
    loader = Loader(open_old(grown), global_batch_size=1, growth="epoch", on_growth=reports.append)
    assert sorted(rows(loader)) == list(range(OLD))
    assert [str(report) for report in reports] == [f"23 → 37 rows (generation 0 → {NEWEST})"]
    assert loader.grown == reports[0] == Growth(0, NEWEST, OLD, NEW)
    assert rows(loader) == epoch_of(fb.open_cache(grown), 1)


def test_within_an_epoch_added_rows_follow_the_old_ones_shuffled_among_themselves(grown: Path) -> None:
    loader = Loader(open_old(grown), global_batch_size=4, growth="within", drop_last=False)
    epoch = rows(loader)
    assert epoch[:OLD] == epoch_of(open_old(grown), 0)
    added = epoch[OLD:]
    assert sorted(added) == list(range(OLD, NEW))
    assert added != sorted(added)
    assert loader.grown == Growth(0, NEWEST, OLD, NEW)
    assert rows(loader) == epoch_of(fb.open_cache(grown), 1), "the next epoch shuffles all rows together"


WINDOW = {"shuffle": Window(rows=6, unit=2, chunks=2, lanes=3)}


@settings(deadline=None, max_examples=scaled(40))
@given(
    before=st.integers(1, OLD - 1),
    batch_size=st.integers(1, 6),
    policy=st.sampled_from(["pinned", "epoch", "within"]),
    shuffle=st.sampled_from([{}, {"shuffle": None}, WINDOW]),
    selection=st.sampled_from([None, Split("train", 0.6, seed=2)]),
    seed=st.integers(0, 50),
)
def test_a_checkpoint_of_the_smaller_cache_goes_on_with_the_grown_one(
    grown: Path, before: int, batch_size: int, policy: Any, shuffle: dict[str, Any], selection: Split | None, seed: int
) -> None:
    options = {"seed": seed, "selection": selection, "drop_last": False, **shuffle}
    old = Loader(open_old(grown), global_batch_size=1, **options)
    total = old.stream.size(0)
    taken = rows_of(old, min(before, total - 1))
    new = Loader(fb.open_cache(grown), global_batch_size=batch_size, growth=policy, **options)
    new.load_state_dict(old.state_dict())
    assert new.grown is not None
    assert (new.grown.old_rows, new.grown.new_rows) == (total, all_rows(grown, selection))
    rest = rows(new)
    assert taken + rest[: total - len(taken)] == rows(Loader(open_old(grown), global_batch_size=1, **options))
    added = rest[total - len(taken) :]
    assert bool(added) == (policy == "within")
    assert len(set(taken + rest)) == len(taken + rest), "no row twice"
    assert rows(new) == epoch_of(fb.open_cache(grown), 1, **options)


@settings(deadline=None, max_examples=scaled(25))
@given(cut=st.integers(1, NEW - 1), batch_size=st.integers(1, 6), seed=st.integers(0, 50))
def test_an_epoch_that_grew_is_resumed_anywhere_in_it(grown: Path, cut: int, batch_size: int, seed: int) -> None:
    options = {"seed": seed, "drop_last": False}
    whole = rows(Loader(open_old(grown), global_batch_size=1, growth="within", **options))
    loader = Loader(open_old(grown), global_batch_size=1, growth="within", **options)
    taken = rows_of(loader, cut)
    state = loader.state_dict()
    assert state["stream"]["generations"] == ([0, NEWEST] if cut > OLD else [0])
    resumed = Loader(fb.open_cache(grown), global_batch_size=batch_size, growth="within", **options)
    resumed.load_state_dict(state)
    assert taken + rows(resumed) == whole


def test_a_state_from_between_two_epochs_begins_the_next_with_all_rows(grown: Path) -> None:
    old = Loader(open_old(grown), global_batch_size=1)
    rows(old)
    new = Loader(fb.open_cache(grown), global_batch_size=1)
    new.load_state_dict(old.state_dict())
    assert new.grown == Growth(0, NEWEST, OLD, NEW)
    assert rows(new) == epoch_of(fb.open_cache(grown), 1)


def test_a_loader_is_told_which_generation_to_take_up(grown: Path) -> None:
    loader = Loader(open_old(grown), global_batch_size=1)
    batches = iter(loader)
    next(batches)
    loader.move_to(NEWEST)
    assert len(list(batches)) == OLD - 1
    assert rows(loader) == epoch_of(fb.open_cache(grown), 1)


def test_rows_published_while_an_epoch_runs_are_taken_up_in_it(tmp_path: Path) -> None:
    root = token_cache(tmp_path, 10)
    loader = Loader(fb.open_cache(root), global_batch_size=3, growth="within")
    taken = []
    for batch in loader:
        taken += numbers_of([batch])[0]
        if len(taken) == 6:
            grow_cache(tmp_path, 10, 4)
        if len(taken) == 9:
            grow_cache(tmp_path, 14, 3)
    assert sorted(taken) == sorted(set(taken))
    assert len(taken) == 15, "17 rows in batches of 3; a batch may hold old rows and new ones"
    assert len(set(range(10)) - set(taken)) + len(set(range(10, 17)) - set(taken)) == 2


def rows(loader: Loader) -> list[int]:
    return [row for batch in numbers_of(loader) for row in batch]


def rows_of(loader: Loader, batches: int) -> list[int]:
    """The rows of the next so many batches."""
    return [row for batch in numbers_of(islice(loader, batches)) for row in batch]


def epoch_of(cache: fb.Cache, epoch: int, **options: Any) -> list[int]:
    loader = Loader(cache, **{"global_batch_size": 1, "drop_last": False, **options})
    loader.epoch = epoch
    return rows(loader)


def all_rows(root: Path, selection: Split | None) -> int:
    cache = fb.open_cache(root)
    return len(cache) if selection is None else len(selection.select(cache))
